//! What a token's time goes to.

use serde::Serialize;

/// What a device is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Part {
    /// Routed experts, to their weighted sum.
    Experts,
    /// Dense rows, with embedding, norms between them, gated activations, residuals and the router.
    Dense,
    /// Attention: the query's way into the latent space, rotary embedding, indexer, attention itself.
    Attention,
    /// Copies between devices, and the wait for others' rows.
    Exchange,
    /// The wait for records that are copied from host memory.
    Copies,
    /// The wait for the host, or for the first device.
    Idle,
}

/// How many there are.
pub const PARTS: usize = 6;

/// What a device was at during a token.
#[derive(Clone, Debug, Default)]
pub struct Parts {
    /// For people.
    pub device: String,
    /// Seconds by [`Part`], from its first launch to its last.
    pub seconds: [f64; PARTS],
    /// Launches of kernels.
    pub launches: u64,
    /// Bytes that went between it and the first device.
    pub crossed: u64,
    /// Bytes of records that were copied to it from the host.
    pub copied: u64,
}

/// A device's share of a token, in microseconds. Gaps between launches count as what they follow; all but
/// the counts add up to the token.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct DeviceSplit {
    /// For people.
    pub device: String,
    /// Routed experts.
    pub experts_us: f64,
    /// Dense rows and what is between them.
    pub dense_us: f64,
    /// Attention.
    pub attention_us: f64,
    /// On the first device copies and the wait for others' rows; on others copies.
    pub exchange_us: f64,
    /// Waits for records from the host.
    pub copies_us: f64,
    /// Outside the first device's first and last launch: the host, what it launches and reads.
    pub launch_us: f64,
    /// The rest: on the first device waits for the host in between, on others those for the first device.
    pub idle_us: f64,
    /// Launches of kernels.
    pub launches: f64,
}

impl DeviceSplit {
    /// All but the counts.
    pub fn sum(&self) -> f64 {
        self.experts_us
            + self.dense_us
            + self.attention_us
            + self.exchange_us
            + self.copies_us
            + self.launch_us
            + self.idle_us
    }
}

/// Means of some tokens, or passes over several, measured with events between the parts, which take a
/// little time themselves.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Split {
    /// Tokens that these are means of.
    pub tokens: usize,
    /// A token, in microseconds, events included.
    pub token_us: f64,
    /// The one before these, which was recorded, or had to allocate what the others have found.
    pub first_us: f64,
    /// Its recordings; 0 where each launch was made by itself.
    pub recordings: usize,
    /// Each device; the first has all but some of the experts.
    pub devices: Vec<DeviceSplit>,
    /// Time of the experts on the device where they take longest, over the mean of all devices.
    pub imbalance: f64,
    /// Bytes between devices.
    pub crossed_bytes: f64,
    /// Bytes of records from the host.
    pub copied_bytes: f64,
}

impl Split {
    /// Adds a token of `seconds`, all of it, whose parts are these.
    pub fn add(&mut self, seconds: f64, parts: &[Parts]) {
        self.devices.resize(parts.len(), DeviceSplit::default());
        self.tokens += 1;
        let n = self.tokens as f64;
        let add = |mean: &mut f64, value: f64| *mean += (value - *mean) / n;
        let us = |s: f64| 1e6 * s;
        add(&mut self.token_us, us(seconds));
        let span: f64 = parts.first().map_or(0.0, |p| p.seconds.iter().sum());
        let launch = (seconds - span).max(0.0);
        for (to, from) in self.devices.iter_mut().zip(parts) {
            let of = |part: Part| from.seconds[part as usize];
            let busy: f64 = from.seconds.iter().sum::<f64>() - of(Part::Idle);
            to.device.clone_from(&from.device);
            add(&mut to.experts_us, us(of(Part::Experts)));
            add(&mut to.dense_us, us(of(Part::Dense)));
            add(&mut to.attention_us, us(of(Part::Attention)));
            add(&mut to.exchange_us, us(of(Part::Exchange)));
            add(&mut to.copies_us, us(of(Part::Copies)));
            add(&mut to.launch_us, us(launch));
            add(&mut to.idle_us, us(seconds - launch - busy));
            add(&mut to.launches, from.launches as f64);
        }
        let sum = |of: fn(&Parts) -> u64| parts.iter().map(of).sum::<u64>() as f64;
        add(&mut self.crossed_bytes, sum(|p| p.crossed));
        add(&mut self.copied_bytes, sum(|p| p.copied));
        let experts = self.devices.iter().map(|d| d.experts_us);
        let mean = experts.clone().sum::<f64>() / self.devices.len().max(1) as f64;
        let most = experts.fold(0.0, f64::max);
        self.imbalance = if mean > 0.0 { most / mean } else { 1.0 };
    }
}

/// For people.
impl std::fmt::Display for Split {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let whole = self.token_us.max(f64::MIN_POSITIVE);
        write!(f, "{:.1} us, mean of {}", self.token_us, self.tokens)?;
        write!(
            f,
            ", the first {:.1}, {} recordings",
            self.first_us, self.recordings
        )?;
        write!(f, "; MB: ")?;
        let mb = |bytes: f64| bytes / 1e6;
        write!(f, "{:.3} between devices, ", mb(self.crossed_bytes))?;
        write!(f, "{:.3} of records from the host; ", mb(self.copied_bytes))?;
        write!(f, "longest experts {:.2} of the mean", self.imbalance)?;
        for d in &self.devices {
            write!(f, "\n     {}: {:.0} launches", d.device, d.launches)?;
            for (name, us) in [
                ("experts", d.experts_us),
                ("dense", d.dense_us),
                ("attention", d.attention_us),
                ("exchange", d.exchange_us),
                ("copies", d.copies_us),
                ("launch", d.launch_us),
                ("idle", d.idle_us),
            ] {
                write!(f, ", {name} {us:.1} us ({:.1}%)", 100.0 * us / whole)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_add_up_to_the_token() {
        let parts = |scale: f64| {
            let first = [1.0, 2.0, 3.0, 0.5, 0.25, 0.125].map(|s: f64| s * scale);
            let other = [2.0, 0.0, 0.0, 0.25, 0.0, 3.0].map(|s: f64| s * scale);
            [first, other].map(|seconds| Parts {
                seconds,
                launches: 7,
                crossed: 100,
                ..Parts::default()
            })
        };
        let mut split = Split::default();
        split.add(8.0, &parts(1.0));
        split.add(16.0, &parts(2.0));
        assert_eq!((split.tokens, split.token_us), (2, 12e6));
        for d in &split.devices {
            assert!((d.sum() - split.token_us).abs() < 1.0, "{d:?}");
        }
        let [first, other] = &split.devices[..] else {
            panic!("{split:?}");
        };
        assert_eq!((first.experts_us, other.experts_us), (1.5e6, 3e6));
        assert!((first.launch_us - 1.5 * 1.125e6).abs() < 1.0, "{first:?}");
        assert!((first.idle_us - 1.5 * 0.125e6).abs() < 1.0, "{first:?}");
        assert!((split.imbalance - 3.0 / 2.25).abs() < 1e-9);
        assert_eq!((split.crossed_bytes, first.launches), (200.0, 7.0));
        assert!(split.to_string().contains("experts 1500000.0 us (12.5%)"));
    }
}
