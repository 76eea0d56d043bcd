//! The unfinished archive, `OUT.partial`: what an interrupted pack leaves, and what `--resume` keeps.
//!
//! It is the archive itself, without its header, tables and layers: those follow from the experts
//! and the options, and are written last. In the header's place stand `ANSXPART` and a key, the hash
//! of all that the records depend on; an index entry is written once its record has been.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use crate::archive::error::{ANEW, ArchiveError, Kept, NAMED, UNFINISHED, UNWRITABLE};
use crate::archive::format::{self, ALIGN, HEADER, INDEX, MATRIX, u64_at};

const MAGIC: [u8; 8] = *b"ANSXPART";

/// Bytes of magic and key.
const KEYED: usize = 40;

/// The file, locked.
pub struct Partial {
    file: File,
    path: PathBuf,
    out: PathBuf,
    /// Magic and key.
    head: [u8; KEYED],
    /// Whether it was there, to go on with.
    found: bool,
    /// Records in it that are whole.
    records: usize,
}

/// Where the unfinished archive `out` is.
pub fn partial_path(out: &Path) -> PathBuf {
    let mut name = out.as_os_str().to_owned();
    name.push(".partial");
    name.into()
}

impl Partial {
    /// Opens or makes the unfinished `out`, empty unless `resume`.
    pub fn open(out: &Path, resume: bool) -> Result<Self, ArchiveError> {
        let path = partial_path(out);
        let io = |path, action| move |e| ArchiveError::io(path, action, e, UNWRITABLE);
        // The archive takes the place of what is there, which must not be a device or a folder.
        for path in [out, &path] {
            if path.exists() && !path.is_file() {
                return Err(io(path, "write")(std::io::Error::other(
                    "it is there and is not a file",
                )));
            }
        }
        let found = resume && path.exists();
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(io(&path, "make"))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(ArchiveError::Partial {
                    path,
                    what: "another `host pack` is writing it; wait for that one, or choose \
                           another place (-o FILE)",
                });
            }
            // A file system without locks.
            Err(TryLockError::Error(_)) => {}
        }
        if !found {
            file.set_len(0).map_err(io(&path, "empty"))?;
        }
        Ok(Self {
            file,
            path,
            out: out.to_owned(),
            head: [0; KEYED],
            found,
            records: 0,
        })
    }

    fn io(&self, action: &'static str) -> impl Fn(std::io::Error) -> ArchiveError {
        move |e| ArchiveError::io(&self.path, action, e, UNWRITABLE)
    }

    /// Whether there was something to go on with.
    pub fn found(&self) -> bool {
        self.found
    }

    /// The key of a file that was found must be this one; a new file gets it.
    pub fn key(&mut self, key: [u8; 32]) -> Result<(), ArchiveError> {
        let mut head = [0; KEYED];
        head[..8].copy_from_slice(&MAGIC);
        head[8..].copy_from_slice(&key);
        self.head = head;
        if self.found {
            let mut there = [0; KEYED];
            let read =
                (self.file.seek(SeekFrom::Start(0))).and_then(|_| self.file.read_exact(&mut there));
            if read.is_ok() && there == head {
                return Ok(());
            }
            if read.is_ok() && there.starts_with(&format::MAGIC) {
                // Stopped just before it got its name: what it was packed with is no longer known.
                tracing::warn!(
                    "{}: whole, and not named; beginning anew",
                    self.path.display()
                );
                self.found = false;
                self.file.set_len(0).map_err(self.io("empty"))?;
                return self.write(0, &head);
            }
            // Stopped before its first record.
            if self.file.metadata().map_err(self.io("read"))?.len() > HEADER as u64 {
                return Err(ArchiveError::Partial {
                    path: self.path.clone(),
                    what: "it is of other experts, other options or another version; \
                           pack without --resume to begin anew",
                });
            }
        }
        self.write(0, &head)
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> Result<(), ArchiveError> {
        (self.file.seek(SeekFrom::Start(at)))
            .and_then(|_| self.file.write_all(bytes))
            .map_err(self.io("write"))
    }

    /// The record at `at` and its padding, if its entry has that place and its checksum is right.
    pub fn record(&mut self, entry: &[u8; INDEX], at: u64, align: usize) -> Option<Vec<u8>> {
        let len = u64_at(entry, 8);
        let end = at
            .checked_add(len)?
            .checked_next_multiple_of(align as u64)?;
        let fits = u64_at(entry, 0) == at
            && len >= 3 * MATRIX as u64
            && len.is_multiple_of(ALIGN as u64)
            && end <= self.file.metadata().ok()?.len();
        if !fits {
            return None;
        }
        let mut bytes = vec![0; (end - at) as usize];
        self.file.seek(SeekFrom::Start(at)).ok()?;
        self.file.read_exact(&mut bytes).ok()?;
        let padding = bytes.split_off(len as usize);
        let mut h = blake3::Hasher::new();
        h.update_rayon(&bytes);
        let right = h.finalize().as_bytes()[..16] == entry[16..32];
        (right && padding.iter().all(|b| *b == 0)).then_some(bytes)
    }

    /// The index as far as it is there.
    pub fn index(&mut self, at: u64, entries: usize) -> Vec<u8> {
        let mut index = Vec::new();
        let read = (self.file.seek(SeekFrom::Start(at))).and_then(|_| {
            (&self.file)
                .take((entries * INDEX) as u64)
                .read_to_end(&mut index)
        });
        if read.is_err() {
            index.clear();
        }
        index
    }

    /// From here on comes what is coded anew; `records` before it are kept.
    pub fn cut(&mut self, at: u64, records: usize) -> Result<(), ArchiveError> {
        self.records = records;
        self.file.set_len(at).map_err(self.io("shorten"))
    }

    /// Writes records from `at` on, then their entries, `records` of all being there then.
    pub fn append(
        &mut self,
        at: u64,
        bytes: &[Vec<u8>],
        align: usize,
        entries: (u64, &[u8]),
        records: usize,
    ) -> Result<(), ArchiveError> {
        self.file
            .seek(SeekFrom::Start(at))
            .map_err(self.io("write"))?;
        for record in bytes {
            let padding = record.len().next_multiple_of(align) - record.len();
            self.file
                .write_all(record)
                .and_then(|()| self.file.write_all(&vec![0; padding]))
                .map_err(self.io("write"))?;
        }
        self.write(entries.0, entries.1)?;
        self.records = records;
        Ok(())
    }

    /// Writes what comes before the records and gives the file its name.
    pub fn finish(&mut self, front: &[u8]) -> Result<(), ArchiveError> {
        // To flush all records takes long; the key stays meanwhile, so that `--resume` finds them.
        self.write(KEYED as u64, &front[KEYED..])?;
        self.file.sync_all().map_err(self.io("flush"))?;
        if let Err(error) = self.name(&front[..KEYED]) {
            // Else `--resume` would find an archive, and begin anew.
            let head = self.head;
            return Err(match (self.write(0, &head), error) {
                (Ok(()), error) => error,
                (
                    Err(_),
                    ArchiveError::Io {
                        path,
                        action,
                        source,
                        ..
                    },
                ) => ArchiveError::io(&path, action, source, ANEW),
                (Err(_), error) => error,
            });
        }
        let dir = match self.out.parent() {
            Some(p) if p != Path::new("") => p,
            _ => Path::new("."),
        };
        File::open(dir)
            .and_then(|d| d.sync_all())
            .map_err(|e| ArchiveError::io(&self.out, "flush the directory of", e, NAMED))
    }

    /// Puts the archive's own head in the key's place, and the file in the archive's.
    fn name(&mut self, head: &[u8]) -> Result<(), ArchiveError> {
        self.write(0, head)?;
        self.file.sync_all().map_err(self.io("flush"))?;
        std::fs::rename(&self.path, &self.out)
            .map_err(|e| ArchiveError::io(&self.out, "rename to", e, UNWRITABLE))
    }

    /// After a failure: the file goes unless there is something in it to go on with. `of` is the
    /// number of experts.
    pub fn give_up(self, error: ArchiveError, of: usize) -> ArchiveError {
        if self.records == 0 && !self.found {
            // Nothing can be done about a file that stays.
            let _ = std::fs::remove_file(&self.path);
            return error;
        }
        match error {
            ArchiveError::Interrupted { path, .. } => ArchiveError::Interrupted {
                path,
                kept: Some(Kept {
                    path: self.path,
                    experts: self.records,
                    of,
                }),
            },
            ArchiveError::Io {
                path,
                action,
                source,
                remedy: UNWRITABLE,
            } if self.records > 0 => ArchiveError::io(&path, action, source, UNFINISHED),
            other => other,
        }
    }
}
