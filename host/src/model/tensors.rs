//! Memory-mapped safetensors files: lookup with checks, and a writer that needs one tensor at a time.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::tensor::Dtype;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value, json};

use super::error::ModelError;
use crate::files;

/// The longest header that is read, as in the `safetensors` library.
const MAX_HEADER: u64 = 100_000_000;

const DAMAGED: &str = "the file is damaged or cut short: fetch or convert it again";
const FOREIGN: &str = "the file does not belong to this config.json: convert the checkpoint again";

/// A mapped safetensors file whose header has been checked against its length.
pub struct TensorFile {
    path: PathBuf,
    map: Mmap,
    /// First byte of tensor data.
    data: usize,
    metadata: HashMap<String, String>,
    /// In the order of their data.
    tensors: Vec<Info>,
    index: HashMap<String, usize>,
}

struct Info {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    /// Within the data.
    range: Range<usize>,
}

/// One tensor of a [`TensorFile`].
#[derive(Clone, Copy)]
pub struct Tensor<'a> {
    /// Element type.
    pub dtype: Dtype,
    /// Shape.
    pub shape: &'a [usize],
    /// Little-endian elements, row-major.
    pub bytes: &'a [u8],
}

/// A header as its text has it: a tensor named twice is there twice.
struct Header {
    metadata: HashMap<String, String>,
    tensors: Vec<(String, Value)>,
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Header;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut header = Header {
                    metadata: HashMap::new(),
                    tensors: Vec::new(),
                };
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        header.metadata = map.next_value::<Option<_>>()?.unwrap_or_default();
                    } else {
                        header.tensors.push((name, map.next_value()?));
                    }
                }
                Ok(header)
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

/// A tensor's entry in a header.
#[derive(Deserialize)]
struct RawInfo {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: [usize; 2],
}

impl TensorFile {
    /// Maps `path`; `remedy` is for a missing file.
    pub fn open(path: &Path, remedy: &str) -> Result<Self, ModelError> {
        let file = files::open(path).map_err(|e| ModelError::io(path, e, remedy))?;
        // SAFETY: the mapping is read-only and private to this value. As for every user of mapped
        // model files, another process that truncates the file meanwhile ends this one with
        // SIGBUS; `host`'s own writers replace files by rename and never truncate.
        let map = unsafe { Mmap::map(&file) }.map_err(|e| ModelError::io(path, e, remedy))?;
        let (data, header) = read_header(path, &map)?;
        let mut tensors = Vec::with_capacity(header.tensors.len());
        let mut index = HashMap::with_capacity(header.tensors.len());
        for (name, entry) in header.tensors {
            if index.insert(name.clone(), 0).is_some() {
                return Err(ModelError::field(
                    path,
                    name,
                    "each tensor once",
                    "two of that name",
                    DAMAGED,
                ));
            }
            tensors.push(read_info(path, name, entry)?);
        }
        tensors.sort_by_key(|t| (t.range.start, t.range.end));
        let mut end = 0;
        for (i, t) in tensors.iter().enumerate() {
            if t.range.start != end {
                return Err(ModelError::field(
                    path,
                    &t.name,
                    format!("data from byte {end} on, where the tensor before it ends"),
                    t.range.start,
                    DAMAGED,
                ));
            }
            end = t.range.end;
            index.insert(t.name.clone(), i);
        }
        if end != map.len() - data {
            return Err(ModelError::field(
                path,
                "header",
                format!("a whole safetensors file, of {} bytes", data + end),
                format!("{} bytes", map.len()),
                DAMAGED,
            ));
        }
        Ok(Self {
            path: path.into(),
            data,
            metadata: header.metadata,
            tensors,
            index,
            map,
        })
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its length in bytes.
    pub fn bytes(&self) -> u64 {
        self.map.len() as u64
    }

    /// The `__metadata__` entries.
    pub fn metadata(&self) -> &HashMap<String, String> {
        &self.metadata
    }

    /// Names in the order of their data.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.iter().map(|t| t.name.as_str())
    }

    /// The tensor, if there.
    pub fn get(&self, name: &str) -> Option<Tensor<'_>> {
        let info = &self.tensors[*self.index.get(name)?];
        Some(Tensor {
            dtype: info.dtype,
            shape: &info.shape,
            bytes: &self.map[self.data..][info.range.clone()],
        })
    }

    /// The tensor, which must have this shape.
    pub fn shaped(&self, name: &str, shape: &[usize]) -> Result<Tensor<'_>, ModelError> {
        let tensor = self.get(name).ok_or_else(|| {
            ModelError::field(
                &self.path,
                name,
                format!("a tensor of shape {shape:?}"),
                "no such tensor",
                FOREIGN,
            )
        })?;
        if tensor.shape != shape {
            return Err(ModelError::field(
                &self.path,
                name,
                format!("shape {shape:?}"),
                format!("{:?}", tensor.shape),
                FOREIGN,
            ));
        }
        Ok(tensor)
    }
}

/// The header and where data starts. Nothing is allocated before the length that the file gives is
/// known to be within the file.
fn read_header(path: &Path, bytes: &[u8]) -> Result<(usize, Header), ModelError> {
    let wrong =
        |expected: &str, found: String| ModelError::field(path, "header", expected, found, DAMAGED);
    let whole = "a whole safetensors file";
    let Some((n, rest)) = bytes.split_first_chunk::<8>() else {
        return Err(wrong(whole, format!("{} bytes", bytes.len())));
    };
    let n = u64::from_le_bytes(*n);
    if n > MAX_HEADER || n as usize > rest.len() {
        let found = format!("a header of {n} bytes in a file of {}", bytes.len());
        return Err(wrong(whole, found));
    }
    let header = serde_json::from_slice(&rest[..n as usize])
        .map_err(|e| wrong("the JSON of a safetensors file", e.to_string()))?;
    Ok((8 + n as usize, header))
}

fn read_info(path: &Path, name: String, entry: Value) -> Result<Info, ModelError> {
    let wrong = |expected: String, found: String| {
        Err(ModelError::field(path, &name, expected, found, DAMAGED))
    };
    let RawInfo {
        dtype,
        shape,
        data_offsets: [from, to],
    } = match serde_json::from_value(entry) {
        Ok(info) => info,
        Err(e) => return wrong("dtype, shape and data_offsets".into(), e.to_string()),
    };
    let Ok(dtype) = serde_json::from_value::<Dtype>(Value::String(dtype.clone())) else {
        return wrong("a type that safetensors files have".into(), dtype);
    };
    let bits = shape
        .iter()
        .try_fold(dtype.bitsize(), |n, d| n.checked_mul(*d));
    let Some(bits) = bits.filter(|n| n.is_multiple_of(8)) else {
        return wrong(
            "a shape of whole bytes".into(),
            format!("{dtype:?} {shape:?}"),
        );
    };
    if to.checked_sub(from) != Some(bits / 8) {
        return wrong(
            format!("{} bytes, for {dtype:?} {shape:?}", bits / 8),
            format!("data from {from} to {to}"),
        );
    }
    Ok(Info {
        name,
        dtype,
        shape,
        range: from..to,
    })
}

/// What a tensor of a file to be written will be.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Name.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Shape.
    pub shape: Vec<usize>,
    /// Bytes.
    pub bytes: usize,
}

/// The header of a file of these tensors.
fn header_text(entries: &[Entry], metadata: &[(&str, &str)]) -> String {
    let mut header = Map::new();
    let metadata: Map<String, Value> = metadata
        .iter()
        .map(|(k, v)| ((*k).into(), (*v).into()))
        .collect();
    header.insert("__metadata__".into(), metadata.into());
    let mut at = 0;
    for e in entries {
        header.insert(
            e.name.clone(),
            json!({
                "dtype": e.dtype,
                "shape": e.shape,
                "data_offsets": [at, at + e.bytes],
            }),
        );
        at += e.bytes;
    }
    let mut text = Value::Object(header).to_string();
    // Tensor data starts at a multiple of 64, for mapped readers.
    while !(8 + text.len()).is_multiple_of(64) {
        text.push(' ');
    }
    text
}

/// Writes a safetensors file front to back: the header first, then each tensor's bytes in order.
pub struct TensorWriter {
    path: PathBuf,
    out: BufWriter<File>,
    left: std::vec::IntoIter<Entry>,
}

impl TensorWriter {
    /// Creates `path` for these tensors. The caller orders them so that each stays aligned.
    pub fn create(
        path: &Path,
        entries: Vec<Entry>,
        metadata: &[(&str, &str)],
    ) -> Result<Self, ModelError> {
        let text = header_text(&entries, metadata);
        let start = || -> io::Result<BufWriter<File>> {
            let mut out = BufWriter::with_capacity(1 << 20, File::create(path)?);
            out.write_all(&(text.len() as u64).to_le_bytes())?;
            out.write_all(text.as_bytes())?;
            Ok(out)
        };
        Ok(Self {
            out: start().map_err(|e| ModelError::io(path, e, "check space and permissions"))?,
            path: path.into(),
            left: entries.into_iter(),
        })
    }

    /// Goes on with a file that [`TensorWriter::create`] began for the same tensors, after the
    /// first `done` of them; what follows those is dropped.
    pub fn resume(
        path: &Path,
        entries: Vec<Entry>,
        metadata: &[(&str, &str)],
        done: usize,
    ) -> Result<Self, ModelError> {
        let text = header_text(&entries, metadata);
        let data: usize = entries[..done].iter().map(|e| e.bytes).sum();
        let end = (8 + text.len() + data) as u64;
        let open = || -> io::Result<File> {
            let mut file = File::options().read(true).write(true).open(path)?;
            let mut head = vec![0; 8 + text.len()];
            file.read_exact(&mut head)?;
            let same = head[8..] == *text.as_bytes() && file.metadata()?.len() >= end;
            if !same {
                return Err(io::Error::other("not what was begun"));
            }
            file.set_len(end)?;
            file.seek(SeekFrom::Start(end))?;
            Ok(file)
        };
        let file = open().map_err(|e| ModelError::io(path, e, "begin anew, without --resume"))?;
        let mut left = entries.into_iter();
        left.by_ref().take(done).for_each(drop);
        Ok(Self {
            out: BufWriter::with_capacity(1 << 20, file),
            path: path.into(),
            left,
        })
    }

    /// What was written so far is on disk when this returns.
    pub fn sync(&mut self) -> Result<(), ModelError> {
        self.out
            .flush()
            .and_then(|()| self.out.get_ref().sync_data())
            .map_err(|e| ModelError::io(&self.path, e, "check the space left on the disk"))
    }

    /// The next tensor's bytes.
    ///
    /// # Panics
    /// If there is no next tensor or its length was announced otherwise.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), ModelError> {
        let entry = self.left.next().expect("a tensor that was announced");
        assert_eq!(entry.bytes, bytes.len(), "{}", entry.name);
        self.out
            .write_all(bytes)
            .map_err(|e| ModelError::io(&self.path, e, "check the space left on the disk"))
    }

    /// The next tensor's bytes, piece by piece.
    ///
    /// # Panics
    /// If there is no next tensor or the pieces are not as long as was announced.
    pub fn write_pieces(
        &mut self,
        pieces: impl Iterator<Item = Result<Vec<u8>, ModelError>>,
    ) -> Result<(), ModelError> {
        let entry = self.left.next().expect("a tensor that was announced");
        let mut written = 0;
        for piece in pieces {
            let piece = piece?;
            written += piece.len();
            self.out
                .write_all(&piece)
                .map_err(|e| ModelError::io(&self.path, e, "check the space left on the disk"))?;
        }
        assert_eq!(entry.bytes, written, "{}", entry.name);
        Ok(())
    }

    /// The next tensor's bytes in parts of a few MiB, each filled by `fill`.
    ///
    /// # Panics
    /// If there is no next tensor.
    pub fn write_parts(&mut self, mut fill: impl FnMut(&mut [u8])) -> Result<(), ModelError> {
        let entry = self.left.next().expect("a tensor that was announced");
        let mut part = vec![0; entry.bytes.min(4 << 20)];
        let mut left = entry.bytes;
        while left > 0 {
            let part = &mut part[..left.min(4 << 20)];
            fill(part);
            self.out
                .write_all(part)
                .map_err(|e| ModelError::io(&self.path, e, "check the space left on the disk"))?;
            left -= part.len();
        }
        Ok(())
    }

    /// Everything is on disk when this returns.
    ///
    /// # Panics
    /// If announced tensors were not written.
    pub fn finish(self) -> Result<(), ModelError> {
        assert!(
            self.left.len() == 0,
            "{} tensors not written",
            self.left.len()
        );
        let path = self.path;
        self.out
            .into_inner()
            .map_err(io::IntoInnerError::into_error)
            .and_then(|f| f.sync_all())
            .map_err(|e| ModelError::io(&path, e, "check the space left on the disk"))
    }
}

/// Little-endian bytes as f32.
pub fn f32s(bytes: &[u8]) -> std::borrow::Cow<'_, [f32]> {
    if cfg!(target_endian = "little")
        && let Ok(slice) = bytemuck::try_cast_slice(bytes)
    {
        return slice.into();
    }
    bytes
        .as_chunks::<4>()
        .0
        .iter()
        .map(|b| f32::from_le_bytes(*b))
        .collect::<Vec<_>>()
        .into()
}

/// Little-endian bytes as 16-bit words.
pub fn u16s(bytes: &[u8]) -> std::borrow::Cow<'_, [u16]> {
    if cfg!(target_endian = "little")
        && let Ok(slice) = bytemuck::try_cast_slice(bytes)
    {
        return slice.into();
    }
    bytes
        .as_chunks::<2>()
        .0
        .iter()
        .map(|b| u16::from_le_bytes(*b))
        .collect::<Vec<_>>()
        .into()
}
