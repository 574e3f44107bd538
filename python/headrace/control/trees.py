"""Opens what a person names as the source of an import: a folder, or a tar archive told by its content."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

from headrace.control.folder_source import FolderSource
from headrace.control.source import Source
from headrace.control.tar_source import NotATar, TarSource
from headrace.errors import HeadraceError, Invalid, NotFound, Permission


def open_source(path: str, *, volume_folder: str, mountpoints: Sequence[bytes] = (), devices: bool) -> Source:
    """The source at `path`. The volume's own folder and its mounts, if they lie in it, are left out.

    NotFound, Permission: of the path itself. Invalid: neither a folder nor an archive, or a folder of the
    volume itself.
    """
    try:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            volume = os.stat(volume_folder)
            if (volume.st_dev, volume.st_ino) == (status.st_dev, status.st_ino):
                raise Invalid(f"{path} is the volume's own folder: import something else")
            mounted = _devices_of(mountpoints)
            if status.st_dev in mounted:
                raise Invalid(
                    f"{path} lies in volume {volume_folder} itself, which is mounted on "
                    f"{os.fsdecode(mounted[status.st_dev])}: copy within the mount instead (cp -a)"
                )
            skip = frozenset([(volume.st_dev, volume.st_ino)])
            return FolderSource(
                os.fsencode(path), skip=skip, skip_devices=frozenset(mounted), devices=devices
            )
        if stat.S_ISREG(status.st_mode):
            return TarSource(path, devices=devices)
    except FileNotFoundError as error:
        raise NotFound(f"the source {path} does not exist") from error
    except PermissionError as error:
        raise Permission(f"the source {path} may not be read by uid {os.geteuid()}") from error
    except NotATar as error:
        raise Invalid(str(error)) from error
    except HeadraceError:
        raise
    except OSError as error:
        raise Invalid(f"the source {path} cannot be opened: {error.strerror}") from error
    raise Invalid(f"the source {path} is neither a folder nor a tar archive")


def _devices_of(mountpoints: Sequence[bytes]) -> dict[int, bytes]:
    """Device numbers of what is mounted there. What is no mount as this process sees it (another mount
    namespace), or does not let this user in, cannot be walked either."""
    devices = {}
    for mountpoint in mountpoints:
        try:
            if os.path.ismount(mountpoint):
                devices[os.stat(mountpoint).st_dev] = mountpoint
        except OSError:
            continue
    return devices
