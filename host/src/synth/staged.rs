//! A model directory while it is made: `.NAME.synth` beside its final place.
//!
//! Whoever makes it holds a lock on it, and it vanishes where that fails. One without a holder is of a run
//! that was killed: the next run beside it removes it.

use std::fs::{self, File, TryLockError};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::model::ModelError;

const SUFFIX: &str = ".synth";
/// A file that tells a directory of ours, until it has its final name.
const MARK: &str = "unfinished";
const ELSEWHERE: &str = "choose another --to directory";

/// See the module.
pub struct Staged {
    dir: PathBuf,
    to: PathBuf,
    done: bool,
    /// Held until the end.
    _lock: File,
}

impl Staged {
    /// Takes the place `to`, which must be new or an empty directory, and which no other run has taken.
    pub fn new(to: &Path) -> Result<Self, ModelError> {
        let refuse = |expected: &str, found: &str| {
            ModelError::field(to, "directory", expected, found, ELSEWHERE)
        };
        if to.file_name().is_none() {
            return Err(refuse("one with a name", "none"));
        }
        check_free(to)?;
        // Where a link leads to an empty directory, that one is replaced.
        let to = match fs::canonicalize(to) {
            Ok(real) => real,
            Err(_) if to.is_symlink() => {
                return Err(refuse("a new or empty one", "a link to nothing"));
            }
            Err(_) => to.into(),
        };
        let parent = match to.parent() {
            Some(p) if p != Path::new("") => p,
            _ => Path::new("."),
        };
        let unwritable =
            |e| ModelError::io(parent, e, "choose a --to directory that can be written");
        fs::create_dir_all(parent).map_err(unwritable)?;
        let name = to.file_name().unwrap_or_default().to_string_lossy();
        let dir = parent.join(format!(".{name}{SUFFIX}"));
        remove_left(parent, &dir);
        let (lock, made) = take(&dir)?;
        if !made && !is_left(&dir) {
            return Err(ModelError::field(
                &dir,
                "directory",
                "none, or what an earlier run left",
                "other files",
                "remove it, or choose another --to directory",
            ));
        }
        let staged = Self {
            dir,
            to,
            done: false,
            _lock: lock,
        };
        let begin = || {
            if !made {
                said(&staged.dir);
                for entry in fs::read_dir(&staged.dir)? {
                    fs::remove_file(entry?.path())?;
                }
            }
            fs::write(staged.dir.join(MARK), "")
        };
        begin().map_err(|e| ModelError::io(&staged.dir, e, ELSEWHERE))?;
        // The one that had the place may have come to its end meanwhile.
        check_free(&staged.to)?;
        Ok(staged)
    }

    /// Where files go meanwhile.
    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// Gives it its final name.
    pub fn commit(mut self) -> Result<(), ModelError> {
        let fail = |e| ModelError::io(&self.to, e, "check permissions of the directory above");
        fs::rename(&self.dir, &self.to).map_err(fail)?;
        self.done = true;
        fs::remove_file(self.to.join(MARK)).map_err(fail)
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if !self.done {
            let _ = fs::remove_dir_all(&self.dir); // nothing more can be done about it here
        }
    }
}

/// Refuses a place where something is.
fn check_free(to: &Path) -> Result<(), ModelError> {
    let taken = match fs::read_dir(to) {
        Ok(mut entries) => entries.next().is_some(),
        Err(e) if e.kind() == ErrorKind::NotFound => false,
        Err(e) => return Err(ModelError::io(to, e, ELSEWHERE)),
    };
    match taken {
        false => Ok(()),
        true => Err(ModelError::field(
            to,
            "directory",
            "a new or empty one",
            "files",
            ELSEWHERE,
        )),
    }
}

/// Makes the directory, or takes one that nobody holds. Its lock, and whether it is new.
fn take(dir: &Path) -> Result<(File, bool), ModelError> {
    let fail = |e| ModelError::io(dir, e, "choose a --to directory that can be written");
    // One that looks for what was left holds it for a moment, or removes it.
    for _ in 0..10 {
        let made = match fs::create_dir(dir) {
            Ok(()) => true,
            Err(e) if e.kind() == ErrorKind::AlreadyExists => false,
            Err(e) => return Err(fail(e)),
        };
        let lock = match File::open(dir) {
            Ok(lock) => lock,
            Err(e) if e.kind() == ErrorKind::NotFound => continue,
            Err(e) => return Err(fail(e)),
        };
        match lock.try_lock() {
            Ok(()) if is_at(&lock, dir) => return Ok((lock, made)),
            Ok(()) => (),
            Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(20)),
            // A file system without locks: whoever made it has it.
            Err(TryLockError::Error(_)) if made => return Ok((lock, made)),
            Err(TryLockError::Error(_)) => break,
        }
    }
    Err(ModelError::field(
        dir,
        "directory",
        "no other `host synth` to the same place",
        "one that runs",
        "wait for it, or choose another --to directory",
    ))
}

/// Whether what was opened still has this name.
fn is_at(file: &File, path: &Path) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let place = |m: fs::Metadata| (m.dev(), m.ino());
        let found = fs::symlink_metadata(path).map(place);
        found.is_ok_and(|found| file.metadata().map(place).is_ok_and(|own| own == found))
    }
    #[cfg(not(unix))]
    {
        let _ = file;
        path.exists()
    }
}

/// Whether a directory that nobody holds is of a run of ours.
fn is_left(dir: &Path) -> bool {
    let empty = fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_none());
    empty || dir.join(MARK).is_file()
}

/// Removes what runs beside this one left, but not `own`.
fn remove_left(parent: &Path, own: &Path) {
    // What cannot be read or removed stays: it is in nobody's way.
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let path = entry.path();
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let ours = name.starts_with('.') && name.ends_with(SUFFIX) && path != own;
        if !ours || !entry.file_type().is_ok_and(|t| t.is_dir()) {
            continue;
        }
        if let Ok(lock) = File::open(&path)
            && lock.try_lock().is_ok()
            && is_at(&lock, &path)
            && is_left(&path)
            && fs::remove_dir_all(&path).is_ok()
        {
            said(&path);
        }
    }
}

fn said(dir: &Path) {
    tracing::warn!(
        "{}: what an interrupted run left there is removed",
        dir.display()
    );
}
