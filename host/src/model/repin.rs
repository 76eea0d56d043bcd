//! Experts that change places between tokens.

use super::mtp::Mtp;
use super::weights::{Mlp, Model};
use crate::backend::{LoadExperts, Repin};

/// What has begun, and what was done.
#[derive(Default)]
pub(super) struct Moving {
    /// Layers with an exchange that has begun, as [`Model::routed`] numbers them.
    pending: Vec<usize>,
    /// The layer that is asked next.
    next: usize,
    moved: u64,
}

impl<B: LoadExperts> Model<B> {
    /// The routed experts of all layers, with those of the layer that drafts.
    fn routed(&self) -> Vec<&B::Experts> {
        let layers = self.layers.iter().chain(self.mtp.iter().map(Mtp::layer));
        let experts = layers.filter_map(|layer| match &layer.mlp {
            Mlp::Sparse(moe) => Some(&moe.experts),
            Mlp::Dense(_) => None,
        });
        experts.collect()
    }

    /// Between tokens: at most `most` experts come to device memory that were chosen more than some that
    /// are there, and at most as many exchanges begin; layers in turn. No result changes by a bit. After an
    /// error experts are where they were.
    pub fn repin(&self, most: usize) -> Result<(), B::Error> {
        let layers = self.routed();
        let mut moving = self.moving.borrow_mut();
        let mut failed = None;
        for l in std::mem::take(&mut moving.pending) {
            match self.backend.repin(layers[l]) {
                Ok(Repin::Waiting | Repin::Begun) => moving.pending.push(l),
                Ok(Repin::Moved) => moving.moved += 1,
                Ok(Repin::Idle) => (),
                Err(e) => failed = Some(e),
            }
        }
        if let Some(e) = failed {
            return Err(e);
        }
        for _ in 0..layers.len() {
            if moving.pending.len() >= most {
                break;
            }
            let l = moving.next % layers.len();
            moving.next = l + 1;
            if !moving.pending.contains(&l) && self.backend.repin(layers[l])? == Repin::Begun {
                moving.pending.push(l);
            }
        }
        Ok(())
    }

    /// Experts that came to device memory so far.
    pub fn moved(&self) -> u64 {
        self.moving.borrow().moved
    }
}
