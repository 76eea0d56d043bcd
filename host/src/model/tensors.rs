//! Memory-mapped safetensors files: lookup with checks, and a writer that needs one tensor at a time.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde_json::{Map, Value, json};

use super::error::ModelError;

/// A mapped safetensors file whose header has been checked against its length.
pub struct TensorFile {
    path: PathBuf,
    map: Mmap,
    /// First byte of tensor data.
    data: usize,
    header: Metadata,
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

impl TensorFile {
    /// Maps `path`; `remedy` is for a missing file.
    pub fn open(path: &Path, remedy: &str) -> Result<Self, ModelError> {
        let file = File::open(path).map_err(|e| ModelError::io(path, e, remedy))?;
        // SAFETY: the mapping is read-only and private to this value. As for every user of mapped
        // model files, another process that truncates the file meanwhile ends this one with
        // SIGBUS; `host`'s own writers replace files by rename and never truncate.
        let map = unsafe { Mmap::map(&file) }.map_err(|e| ModelError::io(path, e, remedy))?;
        let (n, header) = SafeTensors::read_metadata(&map).map_err(|e| {
            ModelError::field(
                path,
                "header",
                "a whole safetensors file",
                format!("{e} ({} bytes)", map.len()),
                "the file is damaged or cut short: fetch or convert it again",
            )
        })?;
        Ok(Self {
            path: path.into(),
            data: n + 8,
            header,
            map,
        })
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The `__metadata__` entries.
    pub fn metadata(&self) -> Option<&HashMap<String, String>> {
        self.header.metadata().as_ref()
    }

    /// Names in the order of their data.
    pub fn names(&self) -> Vec<String> {
        self.header.offset_keys()
    }

    fn tensor_of<'a>(&'a self, info: &'a TensorInfo) -> Tensor<'a> {
        let (from, to) = info.data_offsets;
        Tensor {
            dtype: info.dtype,
            shape: &info.shape,
            bytes: &self.map[self.data + from..self.data + to],
        }
    }

    /// The tensor, if there.
    pub fn get(&self, name: &str) -> Option<Tensor<'_>> {
        self.header.info(name).map(|info| self.tensor_of(info))
    }

    /// The tensor, which must have this shape.
    pub fn shaped(&self, name: &str, shape: &[usize]) -> Result<Tensor<'_>, ModelError> {
        let tensor = self.get(name).ok_or_else(|| {
            ModelError::field(
                &self.path,
                name,
                format!("a tensor of shape {shape:?}"),
                "no such tensor",
                "the file does not belong to this config.json: convert the checkpoint again",
            )
        })?;
        if tensor.shape != shape {
            return Err(ModelError::field(
                &self.path,
                name,
                format!("shape {shape:?}"),
                format!("{:?}", tensor.shape),
                "the file does not belong to this config.json: convert the checkpoint again",
            ));
        }
        Ok(tensor)
    }
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
        let mut header = Map::new();
        let metadata: Map<String, Value> = metadata
            .iter()
            .map(|(k, v)| ((*k).into(), (*v).into()))
            .collect();
        header.insert("__metadata__".into(), metadata.into());
        let mut at = 0;
        for e in &entries {
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
