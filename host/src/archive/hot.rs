//! The hot set: experts that are used most.

use std::collections::BTreeSet;

use crate::placement::profile::Profile;

/// Experts, by layer and number.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HotSet(BTreeSet<(u32, usize)>);

impl HotSet {
    /// The `most` most used experts of a profile; all that were used by default. Of equally used
    /// ones the first, by layer and number.
    pub fn of_profile(profile: &Profile, most: Option<usize>) -> Self {
        let used = |(l, e): &(u32, u32)| profile.count(*l, *e) > 0.0;
        (profile.ranking().into_iter().filter(used))
            .take(most.unwrap_or(usize::MAX))
            .map(|(l, e)| (l, e as usize))
            .collect()
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn the_most_used_come_first() {
        let text = "# a comment\n1 0 7\n1 2 7.5\n3 1 7\n4 4 0\n";
        let profile = Profile::parse(Path::new("usage.txt"), text).unwrap();
        let hot = |most| {
            let set = HotSet::of_profile(&profile, most);
            set.iter().collect::<Vec<_>>()
        };
        assert_eq!(hot(None), [(1, 0), (1, 2), (3, 1)]);
        assert_eq!(hot(Some(2)), [(1, 0), (1, 2)]);
        assert_eq!(hot(Some(0)), []);
    }
}
