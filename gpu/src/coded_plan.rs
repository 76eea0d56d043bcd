//! Launch parameters of the expert kernels, from a device's limits and the launch's shape.

use crate::coded::RING;
use crate::launch::{DeviceLimits, Launch};
use crate::layout::{Folds, Symbol};
use crate::plane3::Layout;
use crate::{
    decode_plane3, decode_rans, matmul_plane3, matmul_rans, matmul_rans_mma, matmul_rans_tokens,
    matmul_raw, matmul_raw_mma, matmul_raw_narrow,
};

/// A device that a kernel does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DoesNotFit {
    /// The kernel's symbols.
    pub symbol: Symbol,
    /// Bytes of shared memory that a block needs at least.
    pub needed: u32,
    /// Bytes that a block may have.
    pub available: u32,
}

impl core::fmt::Display for DoesNotFit {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let (kind, remedy) = match self.symbol {
            Symbol::Pair => ("pairs", "use `--tier raw`"),
            Symbol::Triple => ("triples", "pack with `--symbols pair`, or use `--tier raw`"),
        };
        write!(
            f,
            "experts coded in {kind} need {} bytes of shared memory a block, the device has {}; \
             {remedy}",
            self.needed, self.available
        )
    }
}

impl core::error::Error for DoesNotFit {}

/// Bytes of a table.
const fn table_bytes(symbol: Symbol) -> u32 {
    4 << symbol.table_bits()
}

/// Fewest warps that are worth a table in shared memory.
const LEAST_WARPS: u32 = 4;

/// Warps of a block whose shared memory is `head` bytes and `warp` for each warp.
fn warps(
    limits: &DeviceLimits,
    symbol: Symbol,
    head: u32,
    warp: u32,
    most: u32,
) -> Result<u32, DoesNotFit> {
    let needed = head + LEAST_WARPS * warp;
    if limits.shared_per_block < needed {
        return Err(DoesNotFit {
            symbol,
            needed,
            available: limits.shared_per_block,
        });
    }
    Ok(((limits.shared_per_block - head) / warp).min(most))
}

/// `matmul_rans_*`: one block a multiprocessor, as many warps as fit; `jobs` is the number of
/// (expert, matrix, block, segment) at most.
pub fn matmul_rans(
    limits: &DeviceLimits,
    symbol: Symbol,
    folds: &Folds,
    jobs: u64,
) -> Result<Launch, DoesNotFit> {
    let (head, warp) = (
        table_bytes(symbol),
        matmul_rans::warp_bytes(folds.pairs() as u32),
    );
    let warps = warps(
        limits,
        symbol,
        head,
        warp,
        matmul_rans::threads(symbol) / 32,
    )?;
    Ok(rans_launch(limits, head, warp, warps, jobs))
}

/// `decode_rans_*`, likewise.
pub fn decode_rans(limits: &DeviceLimits, symbol: Symbol, jobs: u64) -> Result<Launch, DoesNotFit> {
    let head = table_bytes(symbol);
    let warps = warps(limits, symbol, head, RING, decode_rans::THREADS / 32)?;
    Ok(rans_launch(limits, head, RING, warps, jobs))
}

fn rans_launch(limits: &DeviceLimits, head: u32, warp: u32, warps: u32, jobs: u64) -> Launch {
    let grid = jobs.min(u64::from(limits.sms)) as u32;
    Launch::new([grid, 1, 1], warps * 32).shared(head + warps * warp)
}

/// `matmul_rans_tokens_*`: the launch, [`crate::abi::ExpertArgs::stage`] and
/// [`crate::abi::ExpertArgs::max_tokens`]: at most `tokens`, the largest number of tokens of an
/// expert, and fewer where the device has no room for so many. `jobs` as in [`mod@matmul_rans`].
///
/// Two sets where 8 warps are left room for, since a block's jobs may go across a set's end, and as
/// many warps as make the rounds of a multiprocessor's share of the jobs equal.
pub fn matmul_rans_tokens(
    limits: &DeviceLimits,
    symbol: Symbol,
    folds: &Folds,
    tokens: u32,
    jobs: u64,
) -> Result<(Launch, u32, u32), DoesNotFit> {
    let head = table_bytes(symbol);
    let most = matmul_rans_tokens::THREADS / 32;
    let set = |tokens| matmul_rans_tokens::set_bytes(tokens, folds.pairs() as u32);
    let room = |tokens, sets| {
        let taken = head + sets * set(tokens);
        limits.shared_per_block.saturating_sub(taken) / matmul_rans_tokens::WARP_BYTES
    };
    let mut tokens = tokens.clamp(2, matmul_rans_tokens::TOKENS);
    while room(tokens, 1) < LEAST_WARPS && tokens > 2 {
        tokens = matmul_rans_tokens::width(tokens) / 2;
    }
    let fit = match (room(tokens, 2), room(tokens, 1)) {
        (8.., _) => room(tokens, 2).min(most),
        (_, LEAST_WARPS..) => room(tokens, 1).min(most),
        _ => {
            return Err(DoesNotFit {
                symbol,
                needed: head + set(tokens) + LEAST_WARPS * matmul_rans_tokens::WARP_BYTES,
                available: limits.shared_per_block,
            });
        }
    };
    let share = jobs.div_ceil(u64::from(limits.sms)).max(1);
    let rounds = share.div_ceil(u64::from(fit));
    let warps = (share.div_ceil(rounds) as u32).clamp(LEAST_WARPS, fit);
    let warp_bytes = warps * matmul_rans_tokens::WARP_BYTES;
    let stage = ((limits.shared_per_block - head - warp_bytes) / set(tokens)).min(8);
    let grid = jobs.min(u64::from(limits.sms)) as u32;
    let launch =
        Launch::new([grid, 1, 1], warps * 32).shared(head + stage * set(tokens) + warp_bytes);
    Ok((launch, stage, tokens))
}

/// `matmul_rans_mma_*`: the launch and [`crate::abi::ExpertArgs::stage`], where the device has room for
/// it and the columns suit. `sets` is the number of (active expert, segment) at most, `per_set` that of
/// a set's (matrix, block) at most.
///
/// Windows are as short as the number of rounds allows.
pub fn matmul_rans_mma(
    limits: &DeviceLimits,
    symbol: Symbol,
    folds: &Folds,
    sets: u64,
    per_set: u64,
) -> Option<(Launch, u32)> {
    let shared = table_bytes(symbol) + matmul_rans_mma::SHARED;
    if folds.seg_cols() != matmul_rans_mma::COLS
        || folds.rounds != 1
        || shared > limits.shared_per_block
    {
        return None;
    }
    let teams = u64::from(limits.sms * matmul_rans_mma::TEAMS);
    let windows = |stage: u32| sets * per_set.div_ceil(u64::from(stage));
    let rounds = |stage| windows(stage).div_ceil(teams);
    let most = matmul_rans_mma::TEAM;
    let stage = (1..=most).find(|stage| rounds(*stage) == rounds(most))?;
    let grid = windows(stage).clamp(1, u64::from(limits.sms)) as u32;
    let launch = Launch::new([grid, 1, 1], matmul_rans_mma::THREADS).shared(shared);
    Some((launch, stage))
}

/// `matmul_plane3`, `matmul_plane3_half` or `matmul_plane3_narrow`, by the layout's strips: as many
/// blocks as are resident at once. `matrices` is the number of (expert, matrix) at most.
pub fn matmul_plane3(limits: &DeviceLimits, layout: &Layout, matrices: u64) -> Launch {
    let warp = matmul_plane3::warp_bytes(layout.strips as u32);
    let warps = (limits.shared_per_block / warp).clamp(1, matmul_plane3::THREADS / 32);
    plane3_launch(limits, layout, matrices, warps, warp, matmul_plane3::BLOCKS)
}

/// `decode_plane3`, likewise.
pub fn decode_plane3(limits: &DeviceLimits, layout: &Layout, matrices: u64) -> Launch {
    let warp = decode_plane3::WARP_BYTES;
    let warps = (limits.shared_per_block / warp).clamp(1, decode_plane3::THREADS / 32);
    plane3_launch(limits, layout, matrices, warps, warp, 3)
}

fn plane3_launch(
    limits: &DeviceLimits,
    layout: &Layout,
    matrices: u64,
    warps: u32,
    warp_bytes: u32,
    most: u32,
) -> Launch {
    // A block takes 1 KiB of a multiprocessor's shared memory besides its own.
    let resident = (limits.shared_per_sm / (warps * warp_bytes + 1024)).clamp(1, most);
    let jobs = matrices * layout.jobs() as u64;
    let grid = jobs
        .div_ceil(u64::from(warps))
        .min(u64::from(limits.sms * resident)) as u32;
    Launch::new([grid, 1, 1], warps * 32).shared(warps * warp_bytes)
}

/// `matmul_raw` or, for narrow folds, `matmul_raw_narrow`: the launch and
/// [`crate::abi::ExpertArgs::job_rows`]. `matrices` is the number of (expert, matrix) at most.
///
/// Rows of a job are chosen so that the warps' last round is full, at a cost of about 4 rows for a
/// job's start.
pub fn matmul_raw(
    limits: &DeviceLimits,
    rows: usize,
    folds: &Folds,
    matrices: u64,
) -> (Launch, u32) {
    let (threads, blocks) = if folds.fold < matmul_raw::NARROW {
        (matmul_raw_narrow::THREADS, matmul_raw_narrow::BLOCKS)
    } else {
        (matmul_raw::THREADS, 3)
    };
    let slots = u64::from(limits.sms * blocks * (threads / 32));
    let jobs =
        |job_rows: u32| matrices * folds.segs() as u64 * rows.div_ceil(job_rows as usize) as u64;
    let cost = |job_rows: u32| jobs(job_rows).div_ceil(slots) * u64::from(job_rows + 4);
    let mut job_rows = 32;
    for candidate in [24, 16, 12, 8, 4] {
        if cost(candidate) < cost(job_rows) {
            job_rows = candidate;
        }
    }
    let grid = jobs(job_rows)
        .div_ceil(u64::from(threads / 32))
        .min(u64::from(limits.sms * blocks)) as u32;
    (Launch::new([grid, 1, 1], threads), job_rows)
}

/// `matmul_raw_mma`, likewise: jobs of [`matmul_raw_mma::ROWS`] rows.
pub fn matmul_raw_mma(
    limits: &DeviceLimits,
    rows: usize,
    folds: &Folds,
    matrices: u64,
) -> (Launch, u32) {
    let job_rows = matmul_raw_mma::ROWS;
    let jobs = matrices * (folds.segs() * rows.div_ceil(job_rows as usize)) as u64;
    let grid = jobs
        .div_ceil(u64::from(matmul_raw_mma::THREADS / 32))
        .min(u64::from(limits.sms * matmul_raw_mma::BLOCKS)) as u32;
    (Launch::new([grid, 1, 1], matmul_raw_mma::THREADS), job_rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: DeviceLimits = DeviceLimits {
        sms: 132,
        shared_per_block: 227 << 10,
        shared_per_sm: 228 << 10,
        threads_per_sm: 2048,
    };
    const RTX_5090: DeviceLimits = DeviceLimits {
        sms: 170,
        shared_per_block: 99 << 10,
        shared_per_sm: 100 << 10,
        threads_per_sm: 1536,
    };

    #[test]
    fn triples_fill_an_h200() {
        let folds = Folds::new(6144).unwrap();
        let launch = matmul_rans(&H200, Symbol::Triple, &folds, 3072).unwrap();
        assert_eq!(launch.grid, [132, 1, 1]);
        assert_eq!(launch.threads, 768);
        assert_eq!(launch.shared, (128 << 10) + 24 * 4096);
        // 2,064 jobs are 15.6 a multiprocessor.
        let direct = |tokens| matmul_rans_tokens(&H200, Symbol::Triple, &folds, tokens, 2064);
        let (launch, stage, most) = direct(33).unwrap();
        assert_eq!((launch.threads, stage, most), (512, 2, 8));
        let (launch, stage, most) = direct(2).unwrap();
        assert_eq!((launch.threads, stage, most), (512, 8, 2));
    }

    #[test]
    fn windows_fill_an_h200() {
        let wide = Folds::new(6144).unwrap();
        // Gate and up of 8 experts: 24 sets of 86 jobs.
        let (launch, stage) = matmul_rans_mma(&H200, Symbol::Triple, &wide, 24, 86).unwrap();
        assert_eq!((launch.grid[0], launch.threads, stage), (132, 512, 8));
        assert!(launch.shared <= H200.shared_per_block);
        // Of 3 experts.
        let (launch, stage) = matmul_rans_mma(&H200, Symbol::Triple, &wide, 9, 86).unwrap();
        assert_eq!((launch.grid[0], stage), (132, 3));
        let narrow = Folds::new(1536).unwrap();
        assert_eq!(matmul_rans_mma(&H200, Symbol::Pair, &narrow, 24, 86), None);
        assert_eq!(
            matmul_rans_mma(&RTX_5090, Symbol::Pair, &wide, 24, 86),
            None
        );
    }

    #[test]
    fn fewer_tokens_where_shared_memory_is_short() {
        let a100 = DeviceLimits {
            sms: 108,
            shared_per_block: 163 << 10,
            shared_per_sm: 164 << 10,
            threads_per_sm: 2048,
        };
        let folds = Folds::new(6144).unwrap();
        let (launch, stage, most) =
            matmul_rans_tokens(&a100, Symbol::Triple, &folds, 8, 2064).unwrap();
        assert!(launch.shared <= a100.shared_per_block);
        assert_eq!((launch.threads, stage, most), (224, 1, 4));
    }

    #[test]
    fn what_does_not_fit_is_refused_with_a_remedy() {
        let folds = Folds::new(6144).unwrap();
        let error = matmul_rans(&RTX_5090, Symbol::Triple, &folds, 100).unwrap_err();
        assert_eq!(error.available, 99 << 10);
        assert!(error.needed > 128 << 10);
        assert!(error.to_string().contains("--symbols pair"), "{error}");
        assert!(decode_rans(&RTX_5090, Symbol::Triple, 100).is_err());
        assert!(matmul_rans_tokens(&RTX_5090, Symbol::Triple, &folds, 2, 100).is_err());
        let launch = matmul_rans(&RTX_5090, Symbol::Pair, &folds, 10_000).unwrap();
        assert_eq!((launch.grid[0], launch.threads), (170, 512));
    }

    #[test]
    fn every_width_fits_every_limit_it_is_given() {
        for limits in [H200, RTX_5090] {
            for cols in (64..=8192).step_by(64) {
                let folds = Folds::new(cols).unwrap();
                for symbol in [Symbol::Pair, Symbol::Triple] {
                    for tokens in [1, 2, 7, 8, 33] {
                        let direct = matmul_rans_tokens(&limits, symbol, &folds, tokens, 500);
                        assert_eq!(direct.is_ok(), decode_rans(&limits, symbol, 500).is_ok());
                        if let Ok((launch, stage, most)) = direct {
                            assert!(launch.shared <= limits.shared_per_block);
                            assert!(launch.threads >= 128 && (1..=8).contains(&stage));
                            assert_eq!(most, tokens.clamp(2, 8));
                        }
                    }
                    if let Ok(launch) = matmul_rans(&limits, symbol, &folds, 500) {
                        assert!(launch.shared <= limits.shared_per_block);
                        assert!(launch.threads >= 128);
                    }
                }
            }
        }
    }

    #[test]
    fn plane3_fills_a_device() {
        // Gate and up of 8 experts: 16 matrices of 64 by 6 jobs.
        let layout = Layout::new(2048, 6144).unwrap();
        let launch = matmul_plane3(&H200, &layout, 16);
        assert_eq!((launch.grid[0], launch.threads), (396, 256));
        let launch = matmul_plane3(&H200, &Layout::new(6144, 2048).unwrap(), 8);
        assert_eq!((launch.grid[0], launch.threads), (384, 256));
        for limits in [H200, RTX_5090] {
            for cols in (64..=8192).step_by(64) {
                let layout = Layout::new(100, cols).unwrap();
                for launch in [
                    matmul_plane3(&limits, &layout, 10_000),
                    decode_plane3(&limits, &layout, 10_000),
                ] {
                    assert!(launch.shared <= limits.shared_per_block && launch.threads >= 128);
                    assert!(launch.grid[0] >= limits.sms);
                }
            }
        }
    }

    #[test]
    fn raw_jobs_fill_their_rounds() {
        // Gate and up of 8 experts: 16 matrices of 2,048 rows and three segments.
        let folds = Folds::new(6144).unwrap();
        let (launch, rows) = matmul_raw(&H200, 2048, &folds, 16);
        assert_eq!((launch.grid[0], rows), (384, 32));
        let (launch, rows) = matmul_raw(&H200, 6144, &Folds::new(2048).unwrap(), 8);
        assert_eq!((launch.grid[0], rows), (384, 16));
        let (launch, _) = matmul_raw(&H200, 1, &Folds::new(64).unwrap(), 1);
        assert_eq!(launch.grid[0], 1);
    }
}
