//! The safetensors files of a model as one set of tensors.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use safetensors::tensor::Dtype;
use serde_json::Value;

use super::directory::{DENSE_FILE, EXPERTS_FILE};
use super::error::ModelError;
use super::format::{FP8_BLOCK, Format, Weight, groups, likeliest, tell};
use super::tensors::{Tensor, TensorFile, f32s, u16s};
use crate::files;

const FETCH: &str = "fetch the checkpoint again";
const CONTAINER: &str = "fetch or make the container again";

/// Appended to a matrix's name: its scales.
pub const SCALES: &str = ".qs";
/// Appended to a Hugging Face fp8 matrix's name: its scales.
const FP8_SCALES: &str = "_scale_inv";
/// Key of a container's stamps: JSON, from a tensor's name to its format.
const STAMPS_KEY: &str = "colibri.fmt";

/// Doubts that were told.
static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// Tensors of one or more files, each name once.
pub struct Shards {
    files: Vec<TensorFile>,
    index: HashMap<String, usize>,
    stamps: HashMap<String, String>,
    /// Columns of a group, where all grouped matrices may have the same.
    group: Option<usize>,
    /// For messages about what is in none of the files.
    source: PathBuf,
    remedy: String,
}

impl Shards {
    /// One file; `remedy` is for where it is missing.
    pub fn one(path: &Path, remedy: &str) -> Result<Self, ModelError> {
        let foreign = "the file does not belong to this config.json: convert the checkpoint again";
        Self::new(path, &[path.into()], remedy, foreign)
    }

    /// A Hugging Face checkpoint: `model.safetensors`, or what `model.safetensors.index.json` lists.
    pub fn checkpoint(dir: &Path) -> Result<Self, ModelError> {
        let index = dir.join("model.safetensors.index.json");
        let single = dir.join("model.safetensors");
        let remedy = "give a directory with model.safetensors, or its shards and \
                      model.safetensors.index.json";
        if !index.is_file() {
            return Self::new(&single, std::slice::from_ref(&single), remedy, FETCH);
        }
        let wrong = |field: &str, expected: &str, found: String| {
            ModelError::field(&index, field, expected, found, FETCH)
        };
        let bytes = files::read(&index).map_err(|e| ModelError::io(&index, e, FETCH))?;
        let value: Value =
            serde_json::from_slice(&bytes).map_err(|e| wrong("file", "JSON", e.to_string()))?;
        let map = value["weight_map"]
            .as_object()
            .ok_or_else(|| wrong("weight_map", "an object", "something else".into()))?;
        let mut files: Vec<&str> = Vec::new();
        for (name, file) in map {
            match file.as_str() {
                // A shard is beside its index, nowhere else.
                Some(f) if Path::new(f).file_name() == Some(f.as_ref()) => files.push(f),
                _ => {
                    let field = format!("weight_map.{name}");
                    return Err(wrong(&field, "a file name", file.to_string()));
                }
            }
        }
        files.sort_unstable();
        files.dedup();
        let files: Vec<PathBuf> = files.iter().map(|f| dir.join(f)).collect();
        let this = Self::new(&index, &files, remedy, FETCH)?;
        if let Some(missing) = map.keys().find(|n| !this.index.contains_key(*n)) {
            let expected = "a tensor in the shard that the index names";
            return Err(wrong(missing, expected, "none".into()));
        }
        Ok(this)
    }

    /// A container: every safetensors file in `dir` that is not the model directory's own.
    pub fn container(dir: &Path) -> Result<Self, ModelError> {
        let files = container_files(dir).map_err(|e| ModelError::io(dir, e, CONTAINER))?;
        let remedy = match gap(&files) {
            Some(name) => format!("{name} is missing: {CONTAINER}"),
            None => CONTAINER.into(),
        };
        let this = Self::new(dir, &files, CONTAINER, &remedy)?;
        if !this.index.keys().any(|name| name.ends_with(SCALES)) {
            return Err(ModelError::field(
                dir,
                "tensors",
                "quantised ones, with NAME.qs beside NAME",
                "none",
                "a Hugging Face checkpoint runs after `host convert --from DIR --to MODEL_DIR`",
            ));
        }
        Ok(this)
    }

    fn new(
        source: &Path,
        files: &[PathBuf],
        missing: &str,
        remedy: &str,
    ) -> Result<Self, ModelError> {
        let files = files
            .iter()
            .map(|f| TensorFile::open(f, missing))
            .collect::<Result<Vec<_>, _>>()?;
        let mut index = HashMap::new();
        let mut stamps = HashMap::new();
        for (i, shard) in files.iter().enumerate() {
            for name in shard.names() {
                if let Some(before) = index.insert(name.to_string(), i) {
                    let before: &TensorFile = &files[before];
                    return Err(ModelError::field(
                        shard.path(),
                        name,
                        "each tensor once",
                        format!("it is in {} too", before.path().display()),
                        remedy,
                    ));
                }
            }
            read_stamps(shard, &mut stamps)?;
        }
        Ok(Self {
            files,
            index,
            stamps,
            group: None,
            source: source.into(),
            remedy: remedy.into(),
        })
    }

    /// Settles the size of groups: the one that all of these matrices may have, of several the likeliest. That
    /// others fit too is said, once.
    pub fn settle(&mut self, matrices: impl Iterator<Item = (String, [usize; 2])>) {
        let mut common: Option<Vec<usize>> = None;
        let mut divided: HashMap<usize, usize> = HashMap::new();
        let mut doubted = None;
        for (name, [rows, cols]) in matrices {
            let Some(tensor) = self.get(&name) else {
                break; // refused when it is read, unless it is the layer's that drafts, the last
            };
            let Some(scales) = self.get(&format!("{name}{SCALES}")) else {
                continue;
            };
            let fit = groups(rows, cols, tensor.bytes.len(), scales.bytes.len() / 4);
            for group in fit.iter().filter(|g| cols.is_multiple_of(**g)) {
                *divided.entry(*group).or_default() += 1;
            }
            if fit.len() > 1 && doubted.is_none() {
                doubted = Some((name, fit.clone()));
            }
            match &mut common {
                _ if fit.is_empty() => (),
                None => common = Some(fit),
                Some(common) => common.retain(|g| fit.contains(g)),
            }
        }
        let common = common.unwrap_or_default();
        let divides = |g: usize| divided.get(&g).copied().unwrap_or(0);
        self.group = likeliest(&common, divides);
        if let Some((name, fit)) = doubted.filter(|_| common.len() != 1) {
            let others = match self.group {
                Some(group) => format!("groups of {group} columns are taken, where"),
                None => "other matrices have other groups, and here".into(),
            };
            let message = format!(
                "{}: {name}: {others} {fit:?} fit its scales",
                self.source.display()
            );
            if SAID
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .insert(message.clone())
            {
                tracing::warn!("{message}");
            }
        }
    }

    /// The files.
    pub fn files(&self) -> &[TensorFile] {
        &self.files
    }

    /// What was opened: the one file, the index, or the directory.
    pub fn source(&self) -> &Path {
        &self.source
    }

    /// Names, file by file in the order of their data.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.files.iter().flat_map(TensorFile::names)
    }

    /// The tensor, if there.
    pub fn get(&self, name: &str) -> Option<Tensor<'_>> {
        self.files[*self.index.get(name)?].get(name)
    }

    /// The file that has this tensor, or all that there are.
    pub fn path_of(&self, name: &str) -> &Path {
        match self.index.get(name) {
            Some(i) => self.files[*i].path(),
            None => &self.source,
        }
    }

    /// An error about a tensor.
    pub fn wrong(
        &self,
        name: &str,
        expected: impl std::fmt::Display,
        found: impl std::fmt::Display,
    ) -> ModelError {
        ModelError::field(self.path_of(name), name, expected, found, &self.remedy)
    }

    /// The tensor, which must be there.
    pub fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor<'_>, ModelError> {
        self.get(name).ok_or_else(|| {
            self.wrong(
                name,
                format!("a tensor of shape {shape:?}"),
                "no such tensor",
            )
        })
    }

    /// The tensor, which must have this shape.
    pub fn shaped(&self, name: &str, shape: &[usize]) -> Result<Tensor<'_>, ModelError> {
        let tensor = self.tensor(name, shape)?;
        if tensor.shape == shape {
            Ok(tensor)
        } else {
            let found = format!("{:?}", tensor.shape);
            Err(self.wrong(name, format!("shape {shape:?}"), found))
        }
    }

    /// The weights of this name, whatever their format; their scales are not looked at.
    pub fn weight(&self, name: &str, shape: &[usize]) -> Result<Weight<'_>, ModelError> {
        let scales = format!("{name}{SCALES}");
        let (rows, cols) = match shape {
            [rows, cols] => (*rows, *cols),
            _ => (1, shape.iter().product()),
        };
        if shape.len() == 2 && self.index.contains_key(&scales) {
            return self.quantised(name, &scales, rows, cols);
        }
        let tensor = self.tensor(name, shape)?;
        if matches!(tensor.dtype, Dtype::U8 | Dtype::I8) {
            let expected = format!("its scales, {scales}, beside it");
            return Err(self.wrong(name, expected, "no such tensor"));
        }
        let tensor = self.shaped(name, shape)?;
        let of = |format, bytes, scales| Weight {
            format,
            rows,
            cols,
            bytes,
            scales,
        };
        let weight = match tensor.dtype {
            Dtype::BF16 => of(Format::Bf16, tensor.bytes, [][..].into()),
            Dtype::F32 => of(Format::F32, tensor.bytes, [][..].into()),
            Dtype::F8_E4M3 if matches!(shape.len(), 2 | 3) => {
                let name = format!("{name}{FP8_SCALES}");
                // Of several matrices each has blocks of its own.
                let (each, [rows, cols]) = shape.split_at(shape.len() - 2) else {
                    unreachable!("two or three dimensions")
                };
                let mut blocks = each.to_vec();
                blocks.extend([rows.div_ceil(FP8_BLOCK), cols.div_ceil(FP8_BLOCK)]);
                let scales = self.shaped(&name, &blocks)?;
                let scales = match scales.dtype {
                    Dtype::F32 => f32s(scales.bytes),
                    Dtype::BF16 => u16s(scales.bytes)
                        .iter()
                        .map(|b| gpu::arith::bf16(*b))
                        .collect(),
                    other => {
                        return Err(self.wrong(&name, "F32 or BF16", format!("{other:?}")));
                    }
                };
                of(Format::Fp8Block, tensor.bytes, scales)
            }
            other => {
                let expected = "BF16 or F32, or F8_E4M3 with scales of 128 x 128 blocks";
                return Err(ModelError::field(
                    self.path_of(name),
                    name,
                    expected,
                    format!("{other:?}"),
                    "take the bf16, f32 or fp8 checkpoint",
                ));
            }
        };
        match self.stamps.get(name) {
            Some(stamp) if *stamp != weight.format.name(weight.cols) => {
                let expected = format!("{stamp}, as its stamp in {STAMPS_KEY} says");
                Err(self.wrong(name, expected, format!("{:?}", tensor.dtype)))
            }
            _ => Ok(weight),
        }
    }

    fn quantised(
        &self,
        name: &str,
        scales_name: &str,
        rows: usize,
        cols: usize,
    ) -> Result<Weight<'_>, ModelError> {
        let tensor = self.tensor(name, &[rows, cols])?;
        if !matches!(tensor.dtype, Dtype::U8 | Dtype::I8) {
            return Err(self.wrong(name, "U8", format!("{:?}", tensor.dtype)));
        }
        let scales = self.tensor(scales_name, &[rows])?;
        if scales.dtype != Dtype::F32 {
            return Err(self.wrong(scales_name, "F32", format!("{:?}", scales.dtype)));
        }
        let scales = f32s(scales.bytes);
        let stamp = self.stamps.get(name).map(String::as_str);
        let format = tell(
            rows,
            cols,
            tensor.bytes.len(),
            scales.len(),
            stamp,
            self.group,
        )
        .map_err(|e| self.wrong(name, e.expected, e.found))?;
        Ok(Weight {
            format,
            rows,
            cols,
            bytes: tensor.bytes,
            scales,
        })
    }

    /// Refuses scales that are not finite; and, where `signed` is false, negative ones.
    pub fn check_scales(
        &self,
        name: &str,
        weight: &Weight<'_>,
        signed: bool,
    ) -> Result<(), ModelError> {
        let good = |s: &f32| s.is_finite() && (signed || s.is_sign_positive());
        let Some(at) = weight.scales.iter().position(|s| !good(s)) else {
            return Ok(());
        };
        let suffix = match weight.format {
            Format::Fp8Block if !self.index.contains_key(&format!("{name}{SCALES}")) => FP8_SCALES,
            _ => SCALES,
        };
        let expected = if signed {
            "a finite scale"
        } else {
            "a finite scale, not negative"
        };
        Err(ModelError::field(
            self.path_of(name),
            format!("{name}{suffix}[{at}]"),
            expected,
            weight.scales[at],
            &self.remedy,
        ))
    }
}

/// Adds a file's stamps; two files may say the same of a tensor, not different things.
fn read_stamps(file: &TensorFile, to: &mut HashMap<String, String>) -> Result<(), ModelError> {
    let Some(text) = file.metadata().get(STAMPS_KEY) else {
        return Ok(());
    };
    let wrong = |field: &str, expected: String, found: String| {
        Err(ModelError::field(
            file.path(),
            field,
            expected,
            found,
            CONTAINER,
        ))
    };
    let map: HashMap<String, String> = match serde_json::from_str(text) {
        Ok(map) => map,
        Err(e) => {
            let expected = "a JSON object from names to formats".into();
            return wrong(STAMPS_KEY, expected, e.to_string());
        }
    };
    for (name, format) in map {
        if let Some(before) = to.get(&name)
            && *before != format
        {
            let expected = format!("{before}, as another file's {STAMPS_KEY} says");
            return wrong(&name, expected, format);
        }
        to.insert(name, format);
    }
    Ok(())
}

/// Safetensors files in `dir` that make up a container.
fn container_files(dir: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir)? {
        let name = entry?.file_name();
        let own = name == DENSE_FILE || name == EXPERTS_FILE;
        if Path::new(&name)
            .extension()
            .is_some_and(|e| e == "safetensors")
            && !own
        {
            files.push(dir.join(name));
        }
    }
    files.sort_unstable();
    Ok(files)
}

/// Whether `dir` has files that a container would have.
pub fn looks_like_container(dir: &Path) -> bool {
    !dir.join(DENSE_FILE).exists() && container_files(dir).is_ok_and(|files| !files.is_empty())
}

/// The first file that a numbered series lacks: `x-00003.safetensors`, `x-00003-of-00010.safetensors`.
fn gap(files: &[PathBuf]) -> Option<String> {
    // Name before the number, its digits, the number, name after it.
    let parts = |file: &PathBuf| -> Option<(String, usize, usize, String)> {
        let name = file.file_name()?.to_str()?;
        let stem = name.strip_suffix(".safetensors")?;
        let head = stem.rsplit_once("-of-").map_or(stem, |(head, _)| head);
        let digits = head.len() - head.trim_end_matches(|c: char| c.is_ascii_digit()).len();
        let at = head.len() - digits;
        let number = head[at..].parse().ok()?;
        Some((head[..at].into(), digits, number, name[head.len()..].into()))
    };
    let mut series: Vec<_> = files.iter().filter_map(parts).collect();
    series.sort_unstable_by(|a, b| (&a.0, &a.3, a.2).cmp(&(&b.0, &b.3, b.2)));
    let name = |p: &(String, usize, usize, String), n: usize| {
        Some(format!("{}{n:0width$}{}", p.0, p.3, width = p.1))
    };
    for (i, p) in series.iter().enumerate() {
        let before = series[..i].last().filter(|b| b.0 == p.0 && b.3 == p.3);
        match before {
            None if p.2 > 1 => return name(p, 1),
            Some(b) if p.2 > b.2 + 1 => return name(p, b.2 + 1),
            _ => (),
        }
        let last = series.get(i + 1).is_none_or(|n| n.0 != p.0 || n.3 != p.3);
        let of = p.3.strip_prefix("-of-").and_then(|s| s.split('.').next());
        if last && let Some(Ok(of)) = of.map(str::parse::<usize>) {
            let first = series.iter().find(|f| f.0 == p.0 && f.3 == p.3)?.2;
            if p.2 + 1 < of + first {
                return name(p, p.2 + 1);
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_in_numbers_are_seen() {
        let gap = |names: &[&str]| {
            let files: Vec<PathBuf> = names
                .iter()
                .map(|n| format!("/m/{n}.safetensors").into())
                .collect();
            super::gap(&files)
        };
        assert_eq!(gap(&["out-00000", "out-00001", "out-00002"]), None);
        assert_eq!(gap(&["a", "b"]), None);
        let got = gap(&["out-00000", "out-00002"]);
        assert_eq!(got.as_deref(), Some("out-00001.safetensors"));
        let got = gap(&["m-1-of-3", "m-3-of-3"]);
        assert_eq!(got.as_deref(), Some("m-2-of-3.safetensors"));
        let got = gap(&["m-1-of-3", "m-2-of-3"]);
        assert_eq!(got.as_deref(), Some("m-3-of-3.safetensors"));
        assert_eq!(gap(&["m-0-of-2", "m-1-of-2", "idx-0", "idx-1"]), None);
    }
}
