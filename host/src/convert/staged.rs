//! A model directory while it is made: `.NAME.partial` beside its final place.
//!
//! It vanishes where a conversion fails for good, and stays where it was interrupted or the disk was
//! full, for `--resume`: `identity` says of what it is, `progress` holds the digests of the experts
//! that are on disk, 16 bytes each.

use std::fs::{self, File, TryLockError};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use crate::archive::Digest;
use crate::model::directory::DENSE_FILE;
use crate::model::error::ModelError;

const IDENTITY: &str = "identity";
const PROGRESS: &str = "progress";
const ELSEWHERE: &str = "choose a --to directory that can be written";

/// See the module.
pub struct Staged {
    dir: PathBuf,
    to: PathBuf,
    force: bool,
    keep: bool,
    /// Held until the end.
    _lock: File,
}

/// What an interrupted conversion to `to` leaves.
pub fn partial_path(to: &Path) -> PathBuf {
    let name = to.file_name().map(|n| n.to_string_lossy().into_owned());
    parent(to).join(format!(".{}.partial", name.unwrap_or_default()))
}

fn parent(to: &Path) -> &Path {
    match to.parent() {
        Some(p) if !p.as_os_str().is_empty() => p,
        _ => Path::new("."),
    }
}

impl Staged {
    /// Makes the directory, or with `resume` takes the one that is there, whose `identity` must be
    /// this one. What is in `to` is only replaced with `force`.
    pub fn new(
        from: &Path,
        to: &Path,
        force: bool,
        identity: &str,
        resume: bool,
    ) -> Result<Self, ModelError> {
        check_target(from, to, force)?;
        let dir = partial_path(to);
        fs::create_dir_all(&dir).map_err(|e| ModelError::io(&dir, e, ELSEWHERE))?;
        let path = dir.join(IDENTITY);
        let mut lock = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(|e| ModelError::io(&path, e, ELSEWHERE))?;
        match lock.try_lock() {
            Ok(()) => (),
            Err(TryLockError::WouldBlock) => {
                return Err(ModelError::field(
                    &dir,
                    "directory",
                    "no other conversion to the same place",
                    "one that runs",
                    "wait for it, or choose another --to directory",
                ));
            }
            Err(TryLockError::Error(e)) => return Err(ModelError::io(&path, e, ELSEWHERE)),
        }
        let found = match resume {
            true => fs::read_to_string(&path).map_err(|e| ModelError::io(&path, e, ELSEWHERE))?,
            false => String::new(),
        };
        // Nothing in it: there was none, or it was stopped before its first line or behind its last.
        if !found.is_empty() {
            if found != identity {
                return Err(ModelError::field(
                    &path,
                    "identity",
                    format!("{identity}, of this checkpoint and these options"),
                    found,
                    "begin anew, without --resume",
                ));
            }
        } else {
            let mut begin = || -> std::io::Result<()> {
                for entry in fs::read_dir(&dir)? {
                    let entry = entry?.path();
                    if entry != path {
                        fs::remove_file(entry)?;
                    }
                }
                lock.set_len(0)?;
                lock.write_all(identity.as_bytes())?;
                lock.sync_all()
            };
            begin().map_err(|e| ModelError::io(&dir, e, ELSEWHERE))?;
        }
        Ok(Self {
            dir,
            to: to.into(),
            force,
            keep: false,
            _lock: lock,
        })
    }

    /// Where files go meanwhile.
    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// Digests of the experts that are on disk.
    pub fn digests(&self) -> Vec<Digest> {
        let bytes = fs::read(self.dir.join(PROGRESS)).unwrap_or_default();
        bytes.as_chunks::<16>().0.to_vec()
    }

    /// Forgets all records but the first `n`.
    pub fn keep_records(&self, n: usize) -> Result<(), ModelError> {
        let path = self.dir.join(PROGRESS);
        let cut = || -> std::io::Result<()> {
            match File::options().write(true).open(&path) {
                Ok(file) => file.set_len(16 * n as u64),
                Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
                Err(e) => Err(e),
            }
        };
        cut().map_err(|e| ModelError::io(&path, e, ELSEWHERE))
    }

    /// Records experts that are on disk.
    pub fn record(&self, digests: &[Digest]) -> Result<(), ModelError> {
        let path = self.dir.join(PROGRESS);
        let write = || -> std::io::Result<()> {
            // Whole records only, whatever an interruption left.
            let mut file = File::options().append(true).create(true).open(&path)?;
            let len = file.metadata()?.len();
            if !len.is_multiple_of(16) {
                file.set_len(len / 16 * 16)?;
            }
            file.write_all(digests.as_flattened())?;
            file.sync_data()
        };
        write().map_err(|e| ModelError::io(&path, e, "check the space left on the disk"))
    }

    /// What becomes of the directory where the conversion ended with `e`.
    pub fn failed(&mut self, e: ModelError) -> ModelError {
        self.keep = matches!(e, ModelError::Interrupted | ModelError::Io { .. });
        e
    }

    /// Gives it its final name.
    pub fn commit(mut self) -> Result<(), ModelError> {
        let fail = |e| ModelError::io(&self.to, e, "check permissions of the directory above");
        for name in [PROGRESS, IDENTITY] {
            match fs::remove_file(self.dir.join(name)) {
                Err(e) if e.kind() != ErrorKind::NotFound => return Err(fail(e)),
                _ => (),
            }
        }
        let old = if self.force && self.to.exists() {
            // Beside the new one, so that both renames stay within a file system.
            let old = self.dir.with_extension("old");
            fs::rename(&self.to, &old).map_err(fail)?;
            Some(old)
        } else {
            None
        };
        if let Err(e) = fs::rename(&self.dir, &self.to) {
            if let Some(old) = old {
                fs::rename(&old, &self.to).map_err(fail)?;
            }
            return Err(fail(e));
        }
        self.keep = true; // renamed away: nothing left to remove under that name
        if let Some(old) = old {
            fs::remove_dir_all(&old).map_err(fail)?;
        }
        Ok(())
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if !self.keep {
            let _ = fs::remove_dir_all(&self.dir); // nothing more can be done about it here
        }
    }
}

fn check_target(from: &Path, to: &Path, force: bool) -> Result<(), ModelError> {
    let refuse = |expected: &str, found: &str, remedy: &str| {
        Err(ModelError::field(to, "directory", expected, found, remedy))
    };
    let elsewhere = "choose another --to directory";
    // What is renamed to that takes its place at the end.
    if to.file_name().is_none() {
        return refuse("one with a name", "none", elsewhere);
    }
    if to.is_symlink() {
        return refuse("a new or empty one", "a link", elsewhere);
    }
    let taken = match fs::read_dir(to) {
        Ok(mut entries) => entries.next().is_some(),
        Err(e) if e.kind() == ErrorKind::NotFound => false,
        Err(e) => return Err(ModelError::io(to, e, elsewhere)),
    };
    if !taken {
        return Ok(());
    }
    if !force {
        return refuse(
            "a new or empty one",
            "files",
            "choose another --to directory or give --force to replace it",
        );
    }
    // What gets replaced is deleted, so it must be a model directory and nothing more.
    let real = |dir: &Path| dir.canonicalize().unwrap_or_else(|_| dir.into());
    if real(from).starts_with(real(to)) {
        return refuse(
            "one without the checkpoint",
            "the --from directory",
            elsewhere,
        );
    }
    if !to.join(DENSE_FILE).is_file() {
        return refuse("a model directory to replace", "other files", elsewhere);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Stopped just before it got its name, or just after it was made.
    #[test]
    fn what_does_not_say_what_it_is_begins_anew() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        let partial = partial_path(&to);
        for identity in [None, Some("")] {
            fs::create_dir_all(&partial).unwrap();
            fs::write(partial.join(DENSE_FILE), "of something").unwrap();
            if let Some(identity) = identity {
                fs::write(partial.join(IDENTITY), identity).unwrap();
            }
            let staged = Staged::new(&from, &to, false, "of this", true).unwrap();
            assert!(!partial.join(DENSE_FILE).exists());
            let found = fs::read_to_string(partial.join(IDENTITY)).unwrap();
            assert_eq!(found, "of this");
            drop(staged);
            assert!(!partial.exists());
        }
    }
}
