//! The hot set: experts that are used most, from a usage profile.

use std::collections::BTreeSet;
use std::path::Path;

use super::ArchiveError;
use super::error::NO_PROFILE;

/// Experts, by layer and number.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HotSet(BTreeSet<(u32, usize)>);

impl HotSet {
    /// The `most` most used experts of a usage profile ([`parse`]); all that were used by default.
    /// Of equally used ones the first, by layer and number.
    pub fn read(path: &Path, most: Option<usize>) -> Result<Self, ArchiveError> {
        let text = std::fs::read_to_string(path)
            .map_err(|e| ArchiveError::io(path, "read", e, NO_PROFILE))?;
        let mut uses = parse(&text).map_err(|what| ArchiveError::Source {
            path: path.to_owned(),
            what,
        })?;
        uses.retain(|(_, _, n)| *n > 0.0);
        uses.sort_by(|a, b| b.2.total_cmp(&a.2).then((a.0, a.1).cmp(&(b.0, b.1))));
        uses.truncate(most.unwrap_or(usize::MAX));
        Ok(uses.into_iter().map(|(l, e, _)| (l, e)).collect())
    }

    /// Whether it has an expert.
    pub fn contains(&self, layer: u32, expert: usize) -> bool {
        self.0.contains(&(layer, expert))
    }

    /// Its experts, ascending.
    pub fn iter(&self) -> impl Iterator<Item = (u32, usize)> {
        self.0.iter().copied()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl FromIterator<(u32, usize)> for HotSet {
    fn from_iter<T: IntoIterator<Item = (u32, usize)>>(experts: T) -> Self {
        Self(experts.into_iter().collect())
    }
}

/// Layer, expert and count of each line of a usage profile: `layer expert count`, separated by
/// white space; empty lines and lines that begin with `#` say nothing.
fn parse(text: &str) -> Result<Vec<(u32, usize, f64)>, String> {
    let mut seen = BTreeSet::new();
    let mut uses = Vec::new();
    for (i, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let fields: Vec<&str> = line.split_whitespace().collect();
        let entry = match fields[..] {
            [l, e, n] => (l.parse().ok())
                .zip(e.parse().ok())
                .zip(n.parse::<f64>().ok()),
            _ => None,
        };
        let Some(((layer, expert), n)) = entry.filter(|(_, n)| n.is_finite() && *n >= 0.0) else {
            return Err(format!(
                "line {}: expected `layer expert count`, found {line:?}; {NO_PROFILE}",
                i + 1
            ));
        };
        if !seen.insert((layer, expert)) {
            return Err(format!(
                "line {}: layer {layer}, expert {expert} for the second time; {NO_PROFILE}",
                i + 1
            ));
        }
        uses.push((layer, expert, n));
    }
    Ok(uses)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_used_come_first() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("usage.txt");
        std::fs::write(&file, "# a comment\n3 1 7\n\n1 2 7.5\n1 0 7\n4 4 0\n").unwrap();
        let hot = |most| {
            HotSet::read(&file, most)
                .unwrap()
                .iter()
                .collect::<Vec<_>>()
        };
        assert_eq!(hot(None), [(1, 0), (1, 2), (3, 1)]);
        assert_eq!(hot(Some(2)), [(1, 0), (1, 2)]);
        assert_eq!(hot(Some(0)), []);
    }

    #[test]
    fn what_is_no_profile_is_refused_by_line() {
        for (text, line) in [
            ("1 2", 1),
            ("1 2 3\n1 x 3", 2),
            ("1 2 3 4", 1),
            ("1 2 nan", 1),
            ("1 2 -1", 1),
            ("1 2 3\n\n1 2 5", 3),
        ] {
            let e = parse(text).unwrap_err();
            assert!(e.starts_with(&format!("line {line}: ")), "{text:?}: {e}");
        }
    }
}
