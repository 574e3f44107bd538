"""Opens what a person names as the source of an import: a folder, or a tar archive told by its content."""

from __future__ import annotations

import os
import stat

from headrace.control.folder_source import FolderSource
from headrace.control.source import Source
from headrace.control.tar_source import NotATar, TarSource
from headrace.errors import HeadraceError, Invalid, NotFound, Permission


def open_source(path: str, *, volume_folder: str, devices: bool) -> Source:
    """The source at `path`. The volume's own folder, if it lies in it, is left out.

    NotFound, Permission: of the path itself. Invalid: neither a folder nor an archive.
    """
    try:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            volume = os.stat(volume_folder)
            if (volume.st_dev, volume.st_ino) == (status.st_dev, status.st_ino):
                raise Invalid(f"{path} is the volume's own folder: import something else")
            skip = frozenset([(volume.st_dev, volume.st_ino)])
            return FolderSource(os.fsencode(path), skip=skip, devices=devices)
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
