//! How often each expert was chosen.
//!
//! A profile is text: a line `layer expert count` for each expert that was chosen, ascending;
//! lines that start with `#` are comments. Ansatz writes `# ansatz usage 1` first and, as
//! `# tokens N`, how many tokens the counts are of; where it was guessed what a layer would choose of host memory also
//! `# guessed GUESSED CHOSEN`. The `.coli_usage` files of colibri are such
//! lines without comments, and are read as well.
//!
//! Counts decay: what was recorded before counts half after [`HALF_LIFE`] further tokens, so that
//! they may have decimals.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::{files, whole};

/// Version of the text that is written.
pub const VERSION: u32 = 1;

/// File name of a profile beside its model.
pub const FILE: &str = "usage.txt";

/// Tokens after which older counts weigh half.
pub const HALF_LIFE: f64 = 100_000.0;

/// Wrong guesses times the root of a model's layers, where no profile says how many there are: each of many layers
/// changes the hidden state less. Found: 0.71 (`models/sotu-row`, trained, 8 layers, all experts), and of the experts that
/// are in host memory, which are chosen less often, in synthetic models 1.69 (11 layers), 1.53 (65) and 1.26 (78).
const WRONG: f64 = 1.4;

/// Guesses below which their share says little.
const LEAST_GUESSED: f64 = 256.0;

/// No model has as many layers or experts; keeps numbers of a hostile file small.
const MOST: u32 = 1 << 20;

/// No expert was chosen more often; keeps sums of a hostile file finite.
const MOST_CHOSEN: f64 = 1e18;

/// Counts below this are dropped.
const LEAST: f64 = 5e-4;

/// Why a profile could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
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
    /// A line that is none of a profile.
    #[error(
        "{}: line {line}: expected {expected}, found `{found}`; delete the file to start a new \
         profile, or give another",
        path.display()
    )]
    Line {
        /// The file.
        path: PathBuf,
        /// Its number, from 1.
        line: usize,
        /// What should be there.
        expected: &'static str,
        /// What is there.
        found: String,
    },
}

/// Counts of chosen experts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Profile {
    counts: BTreeMap<(u32, u32), f64>,
    tokens: f64,
    /// Experts that layers were guessed to choose, and those of them that they chose.
    guessed: [f64; 2],
}

impl Profile {
    /// Nothing chosen yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Reads a profile.
    pub fn read(path: &Path) -> Result<Self, ProfileError> {
        let text = files::read_to_string(path).map_err(|source| ProfileError::Io {
            path: path.into(),
            source,
            remedy: "give a profile that `host generate --usage FILE` recorded",
        })?;
        Self::parse(path, &text)
    }

    /// Reads a profile's text; `path` is for messages.
    pub fn parse(path: &Path, text: &str) -> Result<Self, ProfileError> {
        let mut profile = Self::new();
        for (i, line) in text.lines().enumerate() {
            let wrong = |expected| ProfileError::Line {
                path: path.into(),
                line: i + 1,
                expected,
                found: line.chars().take(80).collect(),
            };
            let mut words = line.split_whitespace();
            let Some(first) = words.next() else {
                continue;
            };
            if let Some(comment) = line.trim_start().strip_prefix('#') {
                let words: Vec<&str> = comment.split_whitespace().collect();
                match words[..] {
                    ["ansatz", "usage", version] if version != VERSION.to_string() => {
                        return Err(wrong("version 1"));
                    }
                    ["tokens", n] => {
                        profile.tokens = count(n).ok_or(wrong("a number of tokens"))?;
                    }
                    // Two numbers; other words are a comment of somebody's.
                    ["guessed", guessed, chosen]
                        if [guessed, chosen].iter().all(|n| n.parse::<f64>().is_ok()) =>
                    {
                        let pair = count(guessed).zip(count(chosen));
                        let (guessed, chosen) = (pair.filter(|(all, some)| some <= all))
                            .ok_or(wrong("guesses, and not more that were right"))?;
                        profile.add_guessed(guessed, chosen);
                    }
                    _ => (),
                }
                continue;
            }
            let number = |word: Option<&str>| word?.parse().ok().filter(|n| *n < MOST);
            let entry = || {
                let key = (number(Some(first))?, number(words.next())?);
                let n = count(words.next()?)?;
                words.next().is_none().then_some((key, n))
            };
            let (key, n) = { entry }().ok_or(wrong("layer, expert and count"))?;
            if profile.counts.insert(key, n).is_some() {
                return Err(wrong("each expert once"));
            }
        }
        Ok(profile)
    }

    /// The text of the profile.
    pub fn text(&self) -> String {
        let mut out = format!(
            "# ansatz usage {VERSION}\n# tokens {}\n",
            Decimal(self.tokens)
        );
        if self.guessed[0] >= LEAST {
            let [guessed, chosen] = self.guessed.map(Decimal);
            let _ = writeln!(out, "# guessed {guessed} {chosen}");
        }
        for ((layer, expert), n) in &self.counts {
            if *n >= LEAST {
                let _ = writeln!(out, "{layer} {expert} {}", Decimal(*n));
            }
        }
        out
    }

    /// Writes the profile to `path`: whole or, after a failure, as it was before.
    pub fn write(&self, path: &Path) -> Result<(), ProfileError> {
        let written = whole::write(path, ".usage-", |out| out.write_all(self.text().as_bytes()));
        written.map_err(|source| ProfileError::Io {
            path: path.into(),
            source,
            remedy: "choose a file that can be written",
        })
    }

    /// Adds what one run chose to what the file `path` has, decayed; makes the file if there is none. One
    /// at a time of those that write to its directory, where the file system has locks.
    pub fn record(&self, path: &Path) -> Result<(), ProfileError> {
        let linked = std::fs::canonicalize(path);
        let path = linked.as_deref().unwrap_or(path);
        // The directory's, since the file is replaced. Without a lock two runs at once may lose one's counts.
        let directory = match path.parent() {
            Some(d) if d != Path::new("") => d,
            _ => Path::new("."),
        };
        let lock = std::fs::File::open(directory).ok();
        let _locked = lock.as_ref().map(std::fs::File::lock);
        let mut all = match Self::read(path) {
            Err(ProfileError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => {
                Self::new()
            }
            other => other?,
        };
        all.decay(self.tokens);
        all.merge(self);
        all.write(path)
    }

    /// Counts `n` more choices of an expert.
    pub fn add(&mut self, layer: u32, expert: u32, n: f64) {
        let count = self.counts.entry((layer, expert)).or_default();
        *count = (*count + n).min(MOST_CHOSEN);
    }

    /// Counts `n` more tokens.
    pub fn add_tokens(&mut self, n: f64) {
        self.tokens = (self.tokens + n).min(MOST_CHOSEN);
    }

    /// Counts `guessed` more experts that a layer was guessed to choose, of which it chose `chosen`.
    pub fn add_guessed(&mut self, guessed: f64, chosen: f64) {
        for (sum, n) in self.guessed.iter_mut().zip([guessed, chosen]) {
            *sum = (*sum + n).min(MOST_CHOSEN);
        }
    }

    /// Share of guessed experts that a layer then chooses: what was counted, else what is to be expected of a model of
    /// so many layers.
    pub fn foreseen(&self, layers: usize) -> f64 {
        match self.guessed {
            [guessed, chosen] if guessed >= LEAST_GUESSED => chosen / guessed,
            _ => (1.0 - WRONG / (layers.max(1) as f64).sqrt()).max(0.0),
        }
    }

    /// Tokens that the counts are of; 0 where that is not known.
    pub fn tokens(&self) -> f64 {
        self.tokens
    }

    /// Choices of an expert.
    pub fn count(&self, layer: u32, expert: u32) -> f64 {
        self.counts.get(&(layer, expert)).copied().unwrap_or(0.0)
    }

    /// Whether nothing was chosen.
    pub fn is_empty(&self) -> bool {
        self.counts.is_empty()
    }

    /// Lets `tokens` tokens go by.
    pub fn decay(&mut self, tokens: f64) {
        let factor = (-tokens / HALF_LIFE).exp2();
        self.tokens *= factor;
        self.guessed.iter_mut().for_each(|n| *n *= factor);
        self.counts.retain(|_, n| {
            *n *= factor;
            *n >= LEAST
        });
    }

    /// Adds another's counts.
    pub fn merge(&mut self, other: &Self) {
        self.add_tokens(other.tokens);
        self.add_guessed(other.guessed[0], other.guessed[1]);
        for ((layer, expert), n) in &other.counts {
            self.add(*layer, *expert, *n);
        }
    }

    /// Experts by falling count; of equal counts the lower layer, then the lower expert.
    pub fn ranking(&self) -> Vec<(u32, u32)> {
        let mut all: Vec<_> = self.counts.iter().map(|(key, n)| (*key, *n)).collect();
        all.sort_by(|(_, a), (_, b)| b.total_cmp(a));
        all.into_iter().map(|(key, _)| key).collect()
    }

    /// The first layer and expert that has counts and is none of a model with so many of both.
    pub fn foreign(&self, layers: usize, experts: usize) -> Option<(u32, u32)> {
        let keys = self.counts.keys().copied();
        keys.into_iter()
            .find(|(layer, expert)| *layer as usize >= layers || *expert as usize >= experts)
    }

    /// How often each of a layer's `experts` is chosen for a token, of which there are `top_k`:
    /// numbers from 0 to 1 with the sum `top_k`. Each expert has half a choice beforehand, so that
    /// without counts all are equal and none is impossible.
    pub fn chances(&self, layer: u32, experts: usize, top_k: usize) -> Vec<f64> {
        const PRIOR: f64 = 0.5;
        let counts = (0..experts).map(|e| self.count(layer, e as u32) + PRIOR);
        let mut chances: Vec<f64> = counts.collect();
        // What is above 1 goes to the others.
        let mut sure = 0;
        loop {
            let open: f64 = chances.iter().filter(|p| **p != 1.0).sum();
            let factor = (top_k - sure) as f64 / open;
            let mut more = 0;
            for p in chances.iter_mut().filter(|p| **p != 1.0) {
                *p *= factor;
                if *p >= 1.0 {
                    *p = 1.0;
                    more += 1;
                }
            }
            sure += more;
            if more == 0 || sure >= top_k {
                return chances;
            }
        }
    }
}

/// A count as it is written: not negative, nor more than there can be.
fn count(word: &str) -> Option<f64> {
    let n: f64 = word.parse().ok()?;
    ((0.0..=MOST_CHOSEN).contains(&n) && word.starts_with(|c: char| c.is_ascii_digit()))
        .then_some(n)
}

/// Three decimals at most, none where the number is whole.
struct Decimal(f64);

impl std::fmt::Display for Decimal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let text = format!("{:.3}", self.0);
        f.write_str(text.trim_end_matches('0').trim_end_matches('.'))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(text: &str) -> Result<Profile, String> {
        Profile::parse(Path::new("u.txt"), text).map_err(|e| e.to_string())
    }

    #[test]
    fn runs_at_once_lose_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("usage.txt");
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let path = &path;
                scope.spawn(move || {
                    for _ in 0..8 {
                        let mut run = Profile::new();
                        run.add(thread, 1, 1.0);
                        run.record(path).unwrap();
                    }
                });
            }
        });
        let all = Profile::read(&path).unwrap();
        for thread in 0..8 {
            assert_eq!(all.count(thread, 1), 8.0);
        }
    }

    #[test]
    fn colibri_s_lines_are_read() {
        let p = parse("3 17 42\n3 200 7\n\n77 0 1\n").unwrap();
        assert_eq!(p.count(3, 17), 42.0);
        assert_eq!(p.count(3, 18), 0.0);
        assert_eq!(p.ranking(), [(3, 17), (3, 200), (77, 0)]);
        assert_eq!(p.foreign(78, 201), None);
        assert_eq!(p.foreign(77, 201), Some((77, 0)));
        assert_eq!(p.foreign(78, 200), Some((3, 200)));
        assert_eq!(p.tokens(), 0.0);
    }

    #[test]
    fn guesses_are_kept() {
        let mut p = parse("# guessed 300 240\n3 17 1\n").unwrap();
        assert_eq!(p.foreseen(78), 0.8);
        p.add_guessed(100.0, 40.0);
        assert_eq!(p.foreseen(78), 0.7);
        assert_eq!(parse(&p.text()).unwrap(), p);
        let mut few = Profile::new();
        few.add_guessed(255.0, 255.0);
        for (layers, expected) in [(78, 0.84), (16, 0.65), (1, 0.0), (0, 0.0)] {
            assert!((few.foreseen(layers) - expected).abs() < 0.005, "{layers}");
        }
        few.merge(&p);
        assert_eq!(few.foreseen(78), (280.0 + 255.0) / (400.0 + 255.0));
        few.decay(HALF_LIFE);
        assert!((few.foreseen(78) - 535.0 / 655.0).abs() < 1e-12);
        let twice = parse("# guessed 300 200\n# guessed by hand\n# guessed 100 40\n").unwrap();
        assert_eq!(twice.foreseen(78), 0.6);
        assert!(parse("# guessed -3 1\n").is_err() && parse("# guessed nan 1\n").is_err());
        let error = parse("# guessed 3 4\n").unwrap_err();
        assert!(error.contains("not more that were right"), "{error}");
    }

    #[test]
    fn bad_lines_are_named() {
        for (text, what) in [
            (
                "3 17\n",
                "line 1: expected layer, expert and count, found `3 17`",
            ),
            ("3 17 1\n3 x 1", "line 2: "),
            ("3 17 -1", "layer, expert and count"),
            ("3 17 nan", "layer, expert and count"),
            ("3 17 inf", "layer, expert and count"),
            ("3 17 1e999", "layer, expert and count"),
            ("3 17 1e308\n3 18 1e308\n", "layer, expert and count"),
            ("# tokens 1e300", "line 1: expected a number of tokens"),
            ("3 17 1 1", "layer, expert and count"),
            ("9999999 1 1", "layer, expert and count"),
            ("-3 1 1", "layer, expert and count"),
            ("3 17 1\n3 17 2", "line 2: expected each expert once"),
            ("# ansatz usage 2\n", "line 1: expected version 1"),
            ("# tokens many", "line 1: expected a number of tokens"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(what), "{text:?}: {error}");
            assert!(error.starts_with("u.txt: "), "{error}");
            assert_eq!(error.lines().count(), 1);
        }
    }

    #[test]
    fn recording_decays_and_adds() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join(FILE);
        let mut run = Profile::new();
        run.add(1, 2, 8.0);
        run.add_tokens(HALF_LIFE);
        run.record(&file).unwrap();
        assert_eq!(Profile::read(&file).unwrap(), run);
        run.record(&file).unwrap();
        let both = Profile::read(&file).unwrap();
        assert_eq!(both.count(1, 2), 12.0);
        assert_eq!(both.tokens(), 1.5 * HALF_LIFE);
        let text = std::fs::read_to_string(&file).unwrap();
        assert_eq!(text, "# ansatz usage 1\n# tokens 150000\n1 2 12\n");
        // Counts stay such as can be read again.
        run.add(1, 2, MOST_CHOSEN);
        run.add_tokens(MOST_CHOSEN);
        for _ in 0..2 {
            run.record(&file).unwrap();
            assert_eq!(Profile::read(&file).unwrap().count(1, 2), MOST_CHOSEN);
        }
        // A file that is none is left as it is.
        std::fs::write(&file, "hello\n").unwrap();
        assert!(run.record(&file).is_err());
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "hello\n");
        assert!(run.record(dir.path()).is_err());
        assert!(run.record(&dir.path().join("none/usage.txt")).is_err());
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 1);
    }

    proptest! {
        #[test]
        fn text_goes_round(
            counts in proptest::collection::btree_map((0..99u32, 0..300u32), 1..4_000_000u32, 0..50),
            tokens in 0..1_000_000u32,
        ) {
            let mut p = Profile::new();
            p.add_tokens(f64::from(tokens) / 8.0);
            for ((l, e), n) in counts {
                p.add(l, e, f64::from(n) / 8.0);
            }
            prop_assert_eq!(parse(&p.text()).unwrap(), p);
        }

        #[test]
        fn any_text_is_read_or_refused(text in "[0-9 #.e\n-]{0,60}") {
            let _ = parse(&text);
        }

        #[test]
        fn chances_are_chances(
            counts in proptest::collection::vec(0.0..1e9f64, 1..40),
            top_k in 1..9usize,
        ) {
            let mut p = Profile::new();
            let top_k = top_k.min(counts.len());
            for (e, n) in counts.iter().enumerate() {
                p.add(5, e as u32, *n);
            }
            let chances = p.chances(5, counts.len(), top_k);
            let sum: f64 = chances.iter().sum();
            prop_assert!((sum - top_k as f64).abs() < 1e-9 * top_k as f64, "{}", sum);
            for (i, a) in chances.iter().enumerate() {
                prop_assert!((0.0..=1.0).contains(a));
                for (j, b) in chances.iter().enumerate() {
                    prop_assert!(counts[i] <= counts[j] || a >= b);
                }
            }
        }
    }
}
