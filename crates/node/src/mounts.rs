//! The table of mounts: made and ended by clients, ended all at the engine's end.
//!
//! A mount that the kernel has ended by itself (somebody ran `umount`) is noticed at the next look and leaves
//! the table. Beginnings and ends are logged by the mount itself.

use std::collections::BTreeMap;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use headrace_base::error::errno;
use headrace_base::{Error, Result};
use headrace_format::message;
use headrace_fuse::{Mount, MountOptions, mount};
use headrace_volume::Volume;
use serde_bytes::ByteBuf;

/// What programs that use a mount get at the engine's end before it is taken from them.
const BUSY_PATIENCE: Duration = Duration::from_secs(3);

#[derive(Debug, Default)]
pub struct Mounts {
    /// None: being made.
    table: Mutex<BTreeMap<PathBuf, Option<Mount>>>,
}

impl Mounts {
    pub fn mount(
        &self,
        volume: &Arc<Volume>,
        mountpoint: &[u8],
        read_only: bool,
        allow_other: bool,
    ) -> Result<message::Mounted> {
        let given = Path::new(std::ffi::OsStr::from_bytes(mountpoint));
        if !given.is_absolute() || mountpoint.contains(&0) {
            return Err(Error::invalid(format!("mountpoint {} is not an absolute path", given.display())));
        }
        // As /proc/self/mounts will show it. It also keeps one folder from being mounted under two names.
        // What cannot be resolved (missing, or the mount of an engine that died) is for `mount` to judge.
        let path = given.canonicalize().unwrap_or_else(|_| given.to_owned());
        let folder = volume.folder().canonicalize().unwrap_or_else(|_| volume.folder().to_owned());
        if path.starts_with(&folder) || folder.starts_with(&path) {
            return Err(Error::invalid(format!(
                "mountpoint {} and the volume's folder {} lie in each other: choose a folder elsewhere",
                path.display(),
                volume.folder().display()
            )));
        }
        {
            let mut table = self.live();
            if table.contains_key(&path) {
                return Err(Error::errno(errno::EBUSY, format!("{} is mounted already", path.display())));
            }
            table.insert(path.clone(), None);
        }
        let options = MountOptions {
            read_only,
            allow_other,
            fs_name: format!("headrace:{}", volume.folder().display()),
            // The mount's own default.
            threads: 0,
        };
        // Not under the lock: making a mount waits for the kernel, and `status` must not.
        let made = mount(Arc::clone(volume), &path, options);
        let mut table = self.live();
        match made {
            Ok(mount) => {
                let notes = mount.notes().to_vec();
                table.insert(path.clone(), Some(mount));
                Ok(message::Mounted { mountpoint: bytes(path), notes })
            }
            Err(error) => {
                table.remove(&path);
                Err(error)
            }
        }
    }

    /// EBUSY while files on it are open.
    pub fn unmount(&self, mountpoint: &[u8]) -> Result<()> {
        let given = Path::new(std::ffi::OsStr::from_bytes(mountpoint));
        // A dead mountpoint cannot be resolved: then it is looked up as it is written.
        let path = given.canonicalize().unwrap_or_else(|_| given.to_owned());
        let mount = {
            let mut table = self.live();
            match table.get_mut(&path).map(Option::take) {
                None => {
                    return Err(Error::not_found(format!(
                        "{} is not a mount of this volume",
                        path.display()
                    )));
                }
                Some(None) => {
                    return Err(Error::errno(
                        errno::EBUSY,
                        format!("{} is just being mounted or unmounted", path.display()),
                    ));
                }
                Some(Some(mount)) => mount,
            }
        };
        let outcome = mount.unmount();
        let mut table = self.live();
        if outcome.is_err() && mount.is_alive() {
            table.insert(path, Some(mount));
            return outcome;
        }
        table.remove(&path);
        Ok(())
    }

    pub fn status(&self) -> Vec<message::MountStatus> {
        self.live()
            .iter()
            .filter_map(|(path, mount)| {
                let mount = mount.as_ref()?;
                Some(message::MountStatus {
                    mountpoint: bytes(path.clone()),
                    read_only: mount.read_only(),
                    requests: mount.requests(),
                })
            })
            .collect()
    }

    pub fn count(&self) -> usize {
        self.live().len()
    }

    /// Ends all mounts, busy ones too: the kernel lets go of those when their last file is closed, and until
    /// then answers them with errors.
    pub fn unmount_all(&self) {
        let table = std::mem::take(&mut *self.lock());
        for (path, mount) in table {
            let Some(mount) = mount else { continue };
            if let Err(error) = mount.stop(BUSY_PATIENCE) {
                tracing::warn!(mountpoint = %path.display(), %error, "not unmounted cleanly");
            }
        }
    }

    /// The table, without those that the kernel has ended.
    fn live(&self) -> MutexGuard<'_, BTreeMap<PathBuf, Option<Mount>>> {
        let mut table = self.lock();
        table.retain(|path, mount| {
            let alive = mount.as_ref().is_none_or(Mount::is_alive);
            if !alive {
                tracing::info!(mountpoint = %path.display(), "the mount was ended from outside");
            }
            alive
        });
        table
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<PathBuf, Option<Mount>>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn bytes(path: PathBuf) -> ByteBuf {
    ByteBuf::from(path.into_os_string().into_vec())
}
