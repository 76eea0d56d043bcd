//! Routing traces: which experts each token of a run was sent to, with which weights.
//!
//! A trace is text. `# ansatz trace 1` comes first; other lines that start with `#` are comments. Then,
//! for each token from 0 on, a line `token layer expert:weight expert:weight ...` for each layer with
//! routed experts, layers and experts ascending. Weights are decimals that give the f32 back.

use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};

use crate::model::Config;
use crate::whole;

/// Version of the text.
pub const VERSION: u32 = 1;

/// No model has as many layers or experts.
const MOST: u32 = 1 << 20;

/// Why a trace cannot be read, written or used.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The operating system refused.
    #[error("{}: {source}; {remedy}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
        /// What to do about it.
        remedy: &'static str,
    },
    /// A line that is none of a trace.
    #[error(
        "{}: line {line}: expected {expected}, found `{found}`; record it anew with `host generate \
         --trace FILE`",
        path.display()
    )]
    Line {
        /// The file.
        path: PathBuf,
        /// Its number, from 1.
        line: usize,
        /// What should be there.
        expected: String,
        /// What is there.
        found: String,
    },
    /// A trace of another model.
    #[error("{}: {what}; record one of this model with `host generate --trace FILE`", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// How it differs.
        what: String,
    },
}

/// Experts of tokens, and their weights.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trace {
    /// Numbers of the layers with routed experts.
    pub layers: Vec<u32>,
    /// Experts of a token.
    pub top_k: usize,
    /// Tokens.
    pub tokens: usize,
    /// Experts, `[tokens, layers, top_k]`.
    pub ids: Vec<u32>,
    /// Weights, likewise.
    pub weights: Vec<f32>,
}

/// `expert:weight` words, the experts ascending.
fn choices<'a>(words: impl Iterator<Item = &'a str>) -> Option<Vec<(u32, f32)>> {
    let all = words
        .map(|word| {
            let (id, weight) = word.split_once(':')?;
            let id = id.parse().ok().filter(|n| *n < MOST)?;
            Some((id, weight.parse().ok().filter(|w: &f32| w.is_finite())?))
        })
        .collect::<Option<Vec<_>>>()?;
    let ascending = all.windows(2).all(|w| w[0].0 < w[1].0);
    (ascending && !all.is_empty()).then_some(all)
}

impl Trace {
    /// Nothing yet, of a model.
    pub fn new(config: &Config) -> Self {
        Self {
            layers: (config.layers.iter().zip(0..))
                .filter_map(|(kind, l)| kind.sparse.then_some(l))
                .collect(),
            top_k: config.router.top_k,
            ..Self::default()
        }
    }

    /// Guesses of [`Trace::ids`], likewise `[tokens, layers, top_k]`, of which the `share`, 0 to 1, are right at least;
    /// the others are what a token half a trace further on chose there, which may be the same.
    pub fn guesses(&self, share: f64) -> Vec<u32> {
        let row = self.layers.len() * self.top_k;
        let other = |i: usize| (i + self.tokens / 2 * row) % self.ids.len();
        let right = |i: usize| {
            // Fibonacci hashing: spread evenly whatever the run of numbers.
            let hash = (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
            (hash as f64) < share * (1u64 << 32) as f64
        };
        (0..self.ids.len())
            .map(|i| self.ids[if right(i) { i } else { other(i) }])
            .collect()
    }

    /// Notes what the tokens from `first` on chose in the `layer`-th layer with experts: ids and
    /// weights `[tokens, top_k]`.
    pub fn put(&mut self, layer: usize, first: usize, ids: &[u32], weights: &[f32]) {
        let (k, row) = (self.top_k, self.layers.len() * self.top_k);
        self.tokens = self.tokens.max(first + ids.len() / k);
        self.ids.resize(self.tokens * row, 0);
        self.weights.resize(self.tokens * row, 0.0);
        for (t, (ids, weights)) in ids.chunks(k).zip(weights.chunks(k)).enumerate() {
            let at = (first + t) * row + layer * k;
            self.ids[at..][..k].copy_from_slice(ids);
            self.weights[at..][..k].copy_from_slice(weights);
        }
    }

    /// Reads a trace.
    pub fn read(path: &Path) -> Result<Self, TraceError> {
        let io = |source| TraceError::Io {
            path: path.into(),
            source,
            remedy: "give a trace that `host generate --trace FILE` recorded",
        };
        let file = BufReader::new(crate::files::open(path).map_err(io)?);
        let mut trace = Self::default();
        let mut versioned = false;
        // Token and, of a first token all of whose layers are known, index of the layer that is next.
        let mut next = (0, 0);
        let mut number = 0;
        for line in file.lines() {
            let line = line.map_err(io)?;
            number += 1;
            let wrong = |expected: &str| TraceError::Line {
                path: path.into(),
                line: number,
                expected: expected.into(),
                found: line.chars().take(80).collect(),
            };
            let words: Vec<&str> = line.split_whitespace().collect();
            match words[..] {
                [] => continue,
                ["#", "ansatz", "trace", version] => {
                    if version != VERSION.to_string() {
                        return Err(wrong("version 1"));
                    }
                    versioned = true;
                    continue;
                }
                [first, ..] if first.starts_with('#') => continue,
                _ if !versioned => return Err(wrong("`# ansatz trace 1` first")),
                _ => (),
            }
            let entry = || {
                let [token, layer, rest @ ..] = &words[..] else {
                    return None;
                };
                let layer = layer.parse().ok().filter(|n: &u32| *n < MOST)?;
                let token = token.parse::<usize>().ok()?;
                Some((token, layer, choices(rest.iter().copied())?))
            };
            let (token, layer, chosen) = { entry }()
                .ok_or_else(|| wrong("a token, a layer, and experts with weights, ascending"))?;
            if token == 1 && next.0 == 0 && next.1 == trace.layers.len() && next.1 > 0 {
                next = (1, 0);
            }
            if token == 0 && next.0 == 0 {
                if trace.layers.last().is_some_and(|l| *l >= layer) {
                    return Err(wrong("layers ascending, each once"));
                }
                trace.layers.push(layer);
                if next.1 == 0 {
                    trace.top_k = chosen.len();
                }
            }
            if token != next.0 || trace.layers.get(next.1) != Some(&layer) {
                let expected = match trace.layers.get(next.1) {
                    Some(layer) => format!("token {}, layer {layer}", next.0),
                    None => "token 0 first".into(),
                };
                return Err(wrong(&expected));
            }
            if chosen.len() != trace.top_k {
                return Err(wrong(&format!("{} experts", trace.top_k)));
            }
            for (id, weight) in chosen {
                trace.ids.push(id);
                trace.weights.push(weight);
            }
            next.1 += 1;
            if next.0 > 0 && next.1 == trace.layers.len() {
                next = (next.0 + 1, 0);
            }
        }
        // A first token is whole where a second one begins, or the text ends.
        trace.tokens = if next.0 == 0 {
            usize::from(next.1 > 0)
        } else {
            next.0
        };
        if trace.tokens == 0 || next.0 > 0 && next.1 > 0 {
            return Err(TraceError::Line {
                path: path.into(),
                line: number + 1,
                expected: "every layer of a token".into(),
                found: "the end of the file".into(),
            });
        }
        Ok(trace)
    }

    /// Refuses a trace of another model; `path` is where it is from.
    pub fn check(&self, path: &Path, config: &Config) -> Result<(), TraceError> {
        let foreign = |what: String| {
            Err(TraceError::Foreign {
                path: path.into(),
                what,
            })
        };
        let own = Self::new(config);
        if self.layers != own.layers {
            let (found, want) = (self.layers.len(), own.layers.len());
            return foreign(format!("{found} layers, the model has {want} with experts"));
        }
        if self.top_k != own.top_k {
            return foreign(format!(
                "{} experts a token, the model has {}",
                self.top_k, own.top_k
            ));
        }
        match self.ids.iter().max() {
            Some(id) if *id as usize >= config.router.experts => foreign(format!(
                "expert {id}, the model has {}",
                config.router.experts
            )),
            _ => Ok(()),
        }
    }

    /// Writes the trace to `path`, whole or not at all.
    pub fn write(&self, path: &Path) -> Result<(), TraceError> {
        let written = whole::write(path, ".trace-", |out| {
            writeln!(out, "# ansatz trace {VERSION}")?;
            let mut line = String::new();
            let rows = self
                .ids
                .chunks(self.top_k)
                .zip(self.weights.chunks(self.top_k));
            for (i, (ids, weights)) in rows.enumerate() {
                let (token, layer) = (i / self.layers.len(), i % self.layers.len());
                line.clear();
                let _ = write!(line, "{token} {}", self.layers[layer]);
                for (id, weight) in ids.iter().zip(weights) {
                    let _ = write!(line, " {id}:{weight}");
                }
                writeln!(out, "{line}")?;
            }
            Ok(())
        });
        written.map_err(|source| TraceError::Io {
            path: path.into(),
            source,
            remedy: "choose a file that can be written",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Trace, TraceError> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        Trace::read(file.path())
    }

    #[test]
    fn what_is_written_is_read() {
        let mut trace = Trace {
            layers: vec![1, 2, 5],
            top_k: 2,
            ..Trace::default()
        };
        for tokens in [1, 2, 5] {
            let n = tokens * 2;
            for layer in 0..3 {
                let ids: Vec<u32> = (0..n as u32).map(|i| i % 2 * 7 + layer).collect();
                let weights: Vec<f32> = (0..n).map(|i| 1.0 / (i as f32 + 3.0)).collect();
                trace.put(
                    layer as usize,
                    trace.tokens.min(tokens - 1),
                    &ids[..2],
                    &weights[..2],
                );
            }
            let file = tempfile::NamedTempFile::new().unwrap();
            trace.write(file.path()).unwrap();
            // Tokens that were skipped have expert 0 twice, which is no choice.
            if trace.tokens <= 2 {
                assert_eq!(Trace::read(file.path()).unwrap(), trace);
            }
        }
        let one = read("# ansatz trace 1\n0 3 1:0.5\n0 4 0:1\n").unwrap();
        assert_eq!((one.tokens, &one.layers[..]), (1, &[3, 4][..]));
    }

    #[test]
    fn guesses_are_as_good_as_asked() {
        let (layers, top_k, tokens) = (5, 4, 100);
        let ids: Vec<u32> = (0..(layers * top_k * tokens) as u32).collect();
        let trace = Trace {
            layers: (0..layers as u32).collect(),
            top_k,
            tokens,
            weights: vec![0.25; ids.len()],
            ids,
        };
        assert_eq!(trace.guesses(1.0), trace.ids);
        for share in [0.0, 0.5, 0.75, 0.95] {
            let guesses = trace.guesses(share);
            let right = guesses.iter().zip(&trace.ids).filter(|(a, b)| a == b);
            let found = right.count() as f64 / guesses.len() as f64;
            assert!((found - share).abs() < 0.01, "{share} {found}");
            // What is wrong is another token's choice in the same layer and place.
            let row = (layers * top_k) as u32;
            let ids = guesses.iter().zip(&trace.ids);
            assert!(ids.into_iter().all(|(a, b)| a % row == b % row));
        }
        assert!(Trace::default().guesses(0.5).is_empty());
    }

    #[test]
    fn what_is_none_is_named() {
        for (text, says) in [
            ("", "every layer"),
            ("0 3 1:0.5\n", "`# ansatz trace 1` first"),
            ("# ansatz trace 2\n", "version 1"),
            ("# ansatz trace 1\n0 3\n", "experts with weights"),
            ("# ansatz trace 1\n0 3 1:nan\n", "experts with weights"),
            ("# ansatz trace 1\n0 3 2:1 1:1\n", "ascending"),
            ("# ansatz trace 1\n0 3 1:1\n0 3 1:1\n", "each once"),
            ("# ansatz trace 1\n1 3 1:1\n", "token 0 first"),
            (
                "# ansatz trace 1\n0 3 1:1\n0 4 1:1\n1 4 1:1\n",
                "token 1, layer 3",
            ),
            (
                "# ansatz trace 1\n0 3 1:1\n0 4 1:1\n1 3 1:1\n",
                "every layer",
            ),
            ("# ansatz trace 1\n0 3 1:1\n1 3 1:1 2:1\n", "1 experts"),
            ("# ansatz trace 1\n0 3 1:1\n2 3 1:1\n", "token 0"),
        ] {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains(says), "{text}: {error}");
        }
        let error = Trace::read(Path::new("/nonexistent/t")).unwrap_err();
        assert!(error.to_string().contains("host generate --trace"));
    }
}
