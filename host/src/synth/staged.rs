//! A model directory while it is made: `model` in `.NAME.synth` beside its final place.
//!
//! Whoever makes it holds a lock on `.NAME.synth`, which vanishes where that fails. One without a holder is
//! of a run that was killed: the next run beside it removes it. The final name comes with one rename, after
//! all is on the disk; so what has that name is whole, and has nothing of this in it.

use std::fs::{self, File, TryLockError};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::model::ModelError;

const SUFFIX: &str = ".synth";
/// A file that tells a directory of ours.
const MARK: &str = "unfinished";
/// The model in it.
const MODEL: &str = "model";
const ELSEWHERE: &str = "choose another --to directory";

/// See the module.
pub struct Staged {
    dir: PathBuf,
    model: PathBuf,
    to: PathBuf,
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
        let (lock, made) = take(&dir, File::try_lock)?;
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
            model: dir.join(MODEL),
            dir,
            to,
            _lock: lock,
        };
        let begin = || {
            if !made {
                said(&staged.dir);
                for entry in fs::read_dir(&staged.dir)? {
                    let entry = entry?;
                    match entry.file_type()?.is_dir() {
                        true => fs::remove_dir_all(entry.path())?,
                        false => fs::remove_file(entry.path())?,
                    }
                }
            }
            fs::write(staged.dir.join(MARK), "")?;
            fs::create_dir(&staged.model)
        };
        begin().map_err(|e| ModelError::io(&staged.dir, e, ELSEWHERE))?;
        // The one that had the place may have come to its end meanwhile.
        check_free(&staged.to)?;
        Ok(staged)
    }

    /// Where files go meanwhile.
    pub fn path(&self) -> &Path {
        &self.model
    }

    /// Gives it its final name.
    pub fn commit(self) -> Result<(), ModelError> {
        let sync = || -> std::io::Result<()> {
            for entry in fs::read_dir(&self.model)? {
                File::open(entry?.path())?.sync_all()?;
            }
            sync_directory(&self.model)
        };
        sync().map_err(|e| ModelError::io(&self.model, e, "check the space left on the disk"))?;
        let fail = |e| ModelError::io(&self.to, e, "check permissions of the directory above");
        fs::rename(&self.model, &self.to).map_err(fail)?;
        match self.to.parent() {
            Some(parent) if parent != Path::new("") => sync_directory(parent).map_err(fail),
            _ => sync_directory(Path::new(".")).map_err(fail),
        }
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        let _ = remove(&self.dir); // what stays is removed by the next run
    }
}

/// Names of a directory are on the disk.
fn sync_directory(dir: &Path) -> std::io::Result<()> {
    #[cfg(unix)]
    File::open(dir)?.sync_all()?;
    #[cfg(not(unix))]
    let _ = dir;
    Ok(())
}

/// Removes a directory of ours, the mark after the model: half removed it is still one.
fn remove(dir: &Path) -> std::io::Result<()> {
    match fs::remove_dir_all(dir.join(MODEL)) {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(e),
        _ => fs::remove_dir_all(dir),
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

/// Makes the directory, or takes one that nobody holds, as `try_lock` says. Its lock, and whether it is new.
fn take(
    dir: &Path,
    try_lock: impl Fn(&File) -> Result<(), TryLockError>,
) -> Result<(File, bool), ModelError> {
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
        match try_lock(&lock) {
            Ok(()) if is_at(&lock, dir) => return Ok((lock, made)),
            Ok(()) => (),
            Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(20)),
            // A file system without locks: whoever made it has it.
            Err(TryLockError::Error(_)) if made => return Ok((lock, made)),
            Err(TryLockError::Error(e)) => {
                return Err(ModelError::field(
                    dir,
                    "directory",
                    "none, as nothing tells here whether another `host synth` uses it",
                    format_args!("one that cannot be locked ({e})"),
                    "remove it if none does, or choose another --to directory",
                ));
            }
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
            && remove(&path).is_ok()
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

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(dir: &Path, result: fn() -> Result<(), TryLockError>) -> Result<bool, String> {
        let taken = take(dir, |_| result());
        taken.map(|(_, made)| made).map_err(|e| e.to_string())
    }

    #[test]
    fn held_and_without_locks_are_told_apart() {
        let parent = tempfile::tempdir().unwrap();
        let without = || Err(TryLockError::Error(ErrorKind::Unsupported.into()));
        let held = || Err(TryLockError::WouldBlock);
        let dir = parent.path().join(".model.synth");
        assert_eq!(
            taken(&dir, without),
            Ok(true),
            "nobody else can have made it"
        );
        let e = taken(&dir, without).unwrap_err();
        assert!(e.contains("cannot be locked (unsupported)"), "{e}");
        assert!(!e.contains("one that runs"), "{e}");
        let e = taken(&dir, held).unwrap_err();
        assert!(
            e.contains("no other `host synth` to the same place, found one that runs"),
            "{e}"
        );
        assert_eq!(taken(&dir, || Ok(())), Ok(false));
    }

    /// At every step what has the final name is whole, and what has not is removed by the next run.
    #[test]
    fn the_final_name_comes_last_and_alone() {
        let parent = tempfile::tempdir().unwrap();
        let to = parent.path().join("model");
        let hidden = parent.path().join(".model.synth");
        let staged = Staged::new(&to).unwrap();
        fs::write(staged.path().join("config.json"), "{}").unwrap();
        assert!(!to.exists() && is_left(&hidden));
        staged.commit().unwrap();
        let names = |dir: &Path| -> Vec<_> {
            let entries = fs::read_dir(dir).unwrap();
            entries.map(|e| e.unwrap().file_name()).collect()
        };
        assert_eq!(
            (names(&to), names(parent.path())),
            (vec!["config.json".into()], vec!["model".into()])
        );
        // Stopped after the rename, and in the middle of a removal.
        for left in [&[][..], &[MODEL]] {
            fs::create_dir(&hidden).unwrap();
            fs::write(hidden.join(MARK), "").unwrap();
            for dir in left {
                fs::create_dir(hidden.join(dir)).unwrap();
                fs::write(hidden.join(dir).join("config.json"), "").unwrap();
            }
            assert!(is_left(&hidden));
            drop(Staged::new(&parent.path().join("other")).unwrap());
            assert_eq!(names(parent.path()), ["model"]);
            // Or where the same place is taken again.
            fs::create_dir_all(hidden.join(MODEL)).unwrap();
            fs::write(hidden.join(MARK), "").unwrap();
            let again = parent.path().join("again");
            fs::rename(&hidden, parent.path().join(".again.synth")).unwrap();
            let staged = Staged::new(&again).unwrap();
            assert!(names(staged.path()).is_empty());
            drop(staged);
            assert_eq!(names(parent.path()), ["model"]);
        }
    }
}
