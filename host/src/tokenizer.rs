//! Text to tokens and back.

use std::any::Any;
use std::panic;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use tokenizers::Tokenizer as Inner;

use crate::files;
use crate::model::{Config, ModelError};

/// GLM tokenizers open every text with these two special tokens where their `tokenizer.json` has
/// no post-processor that does it.
const PREFIX: [&str; 2] = ["[gMASK]", "<sop>"];

/// A model's `tokenizer.json`.
pub struct Tokenizer {
    inner: Inner,
    file: PathBuf,
    prefix: Vec<u32>,
}

/// A tokenizer of its JSON, or why it is none: of some damaged files the library panics.
fn parse(bytes: &[u8]) -> Result<Inner, String> {
    // The hook is the process's: of two at once one would put back the other's.
    static HOOK: Mutex<()> = Mutex::new(());
    let held = HOOK.lock().unwrap_or_else(PoisonError::into_inner);
    let hook = panic::take_hook();
    panic::set_hook(Box::new(|_| ()));
    let parsed = panic::catch_unwind(|| Inner::from_bytes(bytes));
    panic::set_hook(hook);
    drop(held);
    match parsed {
        Ok(parsed) => parsed.map_err(|e| e.to_string()),
        Err(why) => Err(said(&*why).into()),
    }
}

/// What a panic said.
fn said(why: &(dyn Any + Send)) -> &str {
    match (why.downcast_ref::<String>(), why.downcast_ref::<&str>()) {
        (Some(text), _) => text,
        (_, Some(text)) => text,
        _ => "damage",
    }
}

impl Tokenizer {
    /// Reads `tokenizer.json` in `dir`; `None` if there is none.
    pub fn read(dir: &Path, config: &Config) -> Result<Option<Self>, ModelError> {
        let file = dir.join("tokenizer.json");
        if !file.is_file() {
            return Ok(None);
        }
        let wrong = |field: &str, expected: String, found: String| {
            ModelError::field(
                &file,
                field,
                expected,
                found,
                "copy it from the checkpoint again",
            )
        };
        let bytes = files::read(&file)
            .map_err(|e| ModelError::io(&file, e, "copy it from the checkpoint again"))?;
        let mut inner = parse(&bytes).map_err(|e| wrong("file", "a tokenizer".into(), e))?;
        // A file may have kept what training cut and filled texts to; a prompt is taken as it is.
        inner.with_padding(None);
        inner
            .with_truncation(None)
            .map_err(|e| wrong("truncation", "one to leave out".into(), e.to_string()))?;
        let size = inner
            .get_vocab(true)
            .values()
            .max()
            .map_or(0, |id| *id as usize + 1);
        if size > config.vocab {
            let expected = format!("ids below vocab_size {}", config.vocab);
            return Err(wrong("vocabulary", expected, format!("{}", size - 1)));
        }
        let added = inner
            .encode("", true)
            .map_err(|e| wrong("post_processor", "one that works".into(), e.to_string()))?;
        let prefix = if added.is_empty() {
            PREFIX
                .iter()
                .map(|t| inner.token_to_id(t))
                .collect::<Option<_>>()
                .unwrap_or_default()
        } else {
            Vec::new()
        };
        Ok(Some(Self {
            inner,
            file,
            prefix,
        }))
    }

    /// Tokens of a prompt, with the special tokens that open one.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, ModelError> {
        let encoding = self.inner.encode(text, true).map_err(|e| {
            ModelError::field(
                &self.file,
                "prompt",
                "text that it encodes",
                e,
                "change the prompt",
            )
        })?;
        Ok([&self.prefix, encoding.get_ids()].concat())
    }

    /// Tokens of a text that has its special tokens written out.
    pub fn encode_as_is(&self, text: &str) -> Result<Vec<u32>, ModelError> {
        let encoding = self.inner.encode(text, false).map_err(|e| {
            let expected = "text that it encodes";
            ModelError::field(&self.file, "prompt", expected, e, "change the prompt")
        })?;
        Ok(encoding.get_ids().to_vec())
    }

    /// A token's id, if there is such a token.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// A decoder for a stream of tokens.
    pub fn stream(&self) -> TextStream<'_> {
        TextStream {
            tokenizer: self,
            pending: Vec::new(),
        }
    }

    fn text(&self, ids: &[u32]) -> Result<String, ModelError> {
        self.inner.decode(ids, true).map_err(|e| {
            ModelError::field(
                &self.file,
                "decoder",
                "one that takes the model's tokens",
                e,
                "copy it from the checkpoint again",
            )
        })
    }
}

/// Tokens held at most while they end within a character. Four tokens make a character of single
/// bytes; tokens that end one and begin the next may chain.
const HELD: usize = 16;

/// Decodes tokens as they come, in whole characters. Special tokens give no text.
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    pending: Vec<u32>,
}

impl TextStream<'_> {
    /// The text that `id` completes, maybe none yet.
    pub fn push(&mut self, id: u32) -> Result<String, ModelError> {
        self.pending.push(id);
        let text = self.tokenizer.text(&self.pending)?;
        // A character cut in the middle decodes to U+FFFD; bytes that are no text at all stay so.
        if text.ends_with('\u{fffd}') && self.pending.len() < HELD {
            return Ok(String::new());
        }
        self.pending.clear();
        Ok(text)
    }

    /// What is left.
    pub fn finish(&mut self) -> Result<String, ModelError> {
        let text = self.tokenizer.text(&self.pending)?;
        self.pending.clear();
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn what_a_panic_said() {
        let said_by = |panics: fn()| said(&*panic::catch_unwind(panics).unwrap_err()).to_owned();
        assert_eq!(said_by(|| panic!("text")), "text");
        assert_eq!(said_by(|| panic!("{}", 1)), "1");
        assert_eq!(said_by(|| panic::panic_any(1)), "damage");
    }

    #[test]
    fn the_hook_outlives_tokenizers_read_at_once() {
        static SEEN: AtomicUsize = AtomicUsize::new(0);
        const MARK: &str = "the hook is there";
        panic::set_hook(Box::new(|info| {
            if info.payload_as_str() == Some(MARK) {
                SEEN.fetch_add(1, Ordering::Relaxed);
            } else {
                eprintln!("{info}");
            }
        }));
        std::thread::scope(|threads| {
            for _ in 0..8 {
                threads.spawn(|| (0..500).for_each(|_| assert!(parse(b"{}").is_err())));
            }
        });
        let panicked = panic::catch_unwind(|| panic!("{MARK}"));
        // The default one again.
        drop(panic::take_hook());
        assert!(panicked.is_err());
        assert_eq!(SEEN.load(Ordering::Relaxed), 1);
    }
}
