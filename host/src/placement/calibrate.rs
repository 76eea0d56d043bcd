//! What this machine takes for each tier, measured in a few seconds with experts of the model, and
//! kept for the next time.

use std::cell::RefCell;
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::Tier;
use super::cost::{Line, Rates};
use super::memory::DensePart;
use crate::archive::{Archive, ArchiveError, Record};
use crate::backend::cpu::{Cpu, CpuError};
use crate::backend::kernels::{Device, DeviceError, KernelBackend, KernelError};
use crate::backend::{Backend, LayerExperts, LoadExperts, Weight, rows, rows_mut};
use crate::bench::synth::Rng;
use crate::disk::reader::{Aligned, BLOCK, DirectFile, read_slot};
use crate::disk::reads::{Read, Reads, Way};
use crate::expert::{Form, MatrixKind};
use crate::files;
use crate::interrupt;
use crate::model::{Config, Model, ModelError, Session, Source, Wanted};

/// Version of the file that rates are kept in.
const VERSION: u32 = 10;

/// Why there are no rates.
#[derive(Debug, thiserror::Error)]
pub enum CalibrateError {
    /// The device.
    #[error("calibration: {0}")]
    Kernel(#[from] KernelError),
    /// The CPU back end.
    #[error("calibration: {0}")]
    Cpu(#[from] CpuError),
    /// The archive.
    #[error(transparent)]
    Archive(#[from] ArchiveError),
    /// The model's files.
    #[error(transparent)]
    Model(Box<ModelError>),
    /// Reads of the archive.
    #[error("{}: cannot read: {source}; check the disk", path.display())]
    Read {
        /// The archive.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Stopped by the user.
    #[error("interrupted")]
    Interrupted,
    /// A file of rates.
    #[error("{}: {what}; give a file that `host plan --save-rates FILE` wrote", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
}

impl From<ModelError> for CalibrateError {
    fn from(e: ModelError) -> Self {
        Self::Model(Box::new(e))
    }
}

impl From<DeviceError> for CalibrateError {
    fn from(e: DeviceError) -> Self {
        CalibrateError::Kernel(e.into())
    }
}

/// Rates and the machine that they are of.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Calibration {
    version: u32,
    /// What was measured on what: processor, device, geometry, disk.
    pub machine: String,
    /// The rates.
    pub rates: Rates,
    /// Tokens whose coded experts the device multiplies as they are; for more it decodes them to memory first.
    #[serde(default = "one")]
    pub undecoded: usize,
}

fn one() -> usize {
    1
}

impl Calibration {
    /// Reads a file of rates.
    pub fn read(path: &Path) -> Result<Self, CalibrateError> {
        let wrong = |what: String| CalibrateError::File {
            path: path.into(),
            what,
        };
        let bytes = files::read(path).map_err(|e| wrong(e.to_string()))?;
        let found: Self = serde_json::from_slice(&bytes).map_err(|e| wrong(e.to_string()))?;
        if found.version != VERSION {
            return Err(wrong(format!(
                "version {}, expected {VERSION}",
                found.version
            )));
        }
        let r = &found.rates;
        let lines = [
            &r.hot,
            &r.ans,
            &r.plane3,
            &r.cpu,
            &r.upload,
            &r.disk,
            &r.exchange,
        ];
        let all = lines.iter().flat_map(|l| [l.fixed, l.each]);
        if all
            .chain([r.round_trip, r.dense, r.dense_two.unwrap_or(0.0)])
            .any(|x| !(x.is_finite() && x >= 0.0))
        {
            return Err(wrong("a rate is negative or no number".into()));
        }
        Ok(found)
    }

    fn write(&self, path: &Path) -> std::io::Result<()> {
        let dir = path.parent().unwrap_or(Path::new("."));
        std::fs::create_dir_all(dir)?;
        let file = tempfile::NamedTempFile::new_in(dir)?;
        serde_json::to_writer_pretty(&file, self)?;
        file.persist(path).map_err(|e| e.error)?;
        Ok(())
    }
}

/// Where rates are kept: `$XDG_CACHE_HOME/ansatz`, else `~/.cache/ansatz`; `None` without a home.
pub fn directory() -> Option<PathBuf> {
    let set = |name| {
        std::env::var_os(name)
            .filter(|v| !v.is_empty())
            .map(PathBuf::from)
    };
    let cache = set("XDG_CACHE_HOME").filter(|p| p.is_absolute());
    let cache = cache.or_else(|| Some(set("HOME")?.join(".cache")))?;
    Some(cache.join("ansatz"))
}

/// The rates of this machine: those kept for it, unless `again`; else measured and kept. Whether
/// they were measured now.
pub fn rates<D: Device + Clone + 'static>(
    backend: &KernelBackend<D>,
    archive: &Archive,
    dir: &Path,
    config: &Config,
    again: bool,
) -> Result<(Calibration, bool), CalibrateError> {
    let dense = &DensePart::open(dir, config)?;
    let machine = machine(backend, archive, config, dense)?;
    let name = &blake3::hash(machine.as_bytes()).to_hex()[..16];
    let file = directory().map(|d| d.join(format!("rates-{name}.json")));
    if !again
        && let Some(file) = &file
        && file.exists()
    {
        match Calibration::read(file) {
            Ok(kept) if kept.machine == machine => return Ok((kept, false)),
            Ok(_) => (),
            // Those of an older version, say.
            Err(CalibrateError::File { path, what }) => {
                tracing::warn!("{}: {what}; measuring again", path.display());
            }
            Err(e) => return Err(e),
        }
    }
    let found = Calibration {
        version: VERSION,
        machine,
        rates: measure(backend, archive, dir, config, dense)?,
        undecoded: backend.undecoded_tokens(archive)?,
    };
    if let Some(file) = &file
        && let Err(e) = found.write(file)
    {
        tracing::warn!("{}: rates are not kept: {e}", file.display());
    }
    Ok((found, true))
}

/// What rates depend on.
fn machine<D: Device>(
    backend: &KernelBackend<D>,
    archive: &Archive,
    config: &Config,
    dense: &DensePart,
) -> Result<String, ArchiveError> {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let cpu = cpuinfo.lines().find_map(|l| l.strip_prefix("model name"));
    let cpu = cpu.map_or("unknown", |l| l.trim_start_matches([' ', '\t', ':']));
    #[cfg(unix)]
    let disk = {
        use std::os::unix::fs::MetadataExt;
        std::fs::metadata(archive.path()).map_or(0, |m| m.dev())
    };
    #[cfg(not(unix))]
    let disk = 0;
    Ok(format!(
        "ansatz {}, kernels {}; {cpu}, {} threads; {}; {}{}, top {}; hidden {}, {} layers, {:.1} + \
         {:.1} MB; disk {disk}",
        env!("CARGO_PKG_VERSION"),
        &env!("ANSATZ_PTX_SOURCES")[..8],
        rayon::current_num_threads(),
        backend.describe(),
        geometry(archive),
        coding(archive)?,
        config.router.top_k,
        config.hidden,
        config.layers.len(),
        dense.floats as f64 / 1e6,
        dense.int8 as f64 / 1e6,
    ))
}

/// What a machine that rates are of says of experts like those of `archive`.
pub fn geometry(archive: &Archive) -> String {
    format!("experts {}, ", archive.shape())
}

/// How experts are coded: the codecs and blocks of the first of each kind, which those that are measured
/// share.
fn coding(archive: &Archive) -> Result<String, ArchiveError> {
    let layer = archive.layer(archive.layers()[0])?;
    let mut parts = Vec::new();
    for plane3 in [false, true] {
        for e in 0..archive.experts() {
            if archive.is_plane3(layer.number(), e)? != plane3 {
                continue;
            }
            let record = layer.record(e)?;
            parts.extend(MatrixKind::ALL.map(|kind| {
                let matrix = record.matrix(kind);
                format!("{} in {}", matrix.codec.name(), matrix.n_blocks())
            }));
            break;
        }
    }
    Ok(parts.join(" "))
}

/// Runs of which the median counts.
const RUNS: usize = 9;

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

/// The half of `times` that took least, since what else a machine does only adds to them.
fn calm<T>(mut times: Vec<T>, took: impl Fn(&T) -> f64) -> Vec<T> {
    times.sort_by(|a, b| took(a).total_cmp(&took(b)));
    times.truncate(times.len().div_ceil(2));
    times
}

/// Of pairs of times, each of what takes longer and of what takes less: medians of both, and of their
/// differences, over the calmer half.
fn undisturbed(pairs: Vec<(f64, f64)>) -> [f64; 3] {
    let pairs = calm(pairs, |p| p.0 + p.1);
    let of = |time: fn(&(f64, f64)) -> f64| median(pairs.iter().map(time).collect());
    [of(|p| p.0), of(|p| p.1), of(|p| p.0 - p.1)]
}

/// Before each step, none of which takes long: ends the calibration where the user has asked to stop.
fn going() -> Result<(), CalibrateError> {
    match interrupt::requested() {
        true => Err(CalibrateError::Interrupted),
        false => Ok(()),
    }
}

/// Measures everything.
pub fn measure<D: Device + Clone + 'static>(
    backend: &KernelBackend<D>,
    archive: &Archive,
    dir: &Path,
    config: &Config,
    part: &DensePart,
) -> Result<Rates, CalibrateError> {
    let shape = *archive.shape();
    let top_k = config.router.top_k.min(archive.experts());
    // Twice as many as a token chooses, so that a cache does not hold them.
    let n = archive.experts().min(2 * top_k);
    let layer = archive.layer(archive.layers()[0])?;
    let records = |plane3: bool| -> Result<Vec<Record<'_>>, ArchiveError> {
        let mut of_kind = Vec::new();
        for e in 0..archive.experts() {
            if of_kind.len() < n && archive.is_plane3(layer.number(), e)? == plane3 {
                of_kind.push(layer.record(e)?);
            }
        }
        Ok(of_kind)
    };
    let (rans, plane3) = (records(false)?, records(true)?);
    let some = if rans.is_empty() { &plane3 } else { &rans };
    let n = some.len();
    let top_k = top_k.min(n);
    let raw = some.iter().map(|r| {
        going()?;
        Ok(r.decode_all()?)
    });
    let raw = raw.collect::<Result<Vec<_>, CalibrateError>>()?;

    let cpu_line = cpu(archive, top_k)?;

    let device = backend.device();
    let seconds = |work: &mut dyn FnMut() -> Result<(), KernelError>| {
        let from = device.event()?;
        work()?;
        let to = device.event()?;
        Ok(device.elapsed(&from, &to)?)
    };
    let sizes = (shape.hidden, n, top_k);
    let experts = backend.load_experts(LayerExperts::Raw(raw), shape, Form::Fused)?;
    let mut hot = line(backend, &experts, sizes, seconds)?;
    drop(experts);
    let coded = |records: Vec<Record<'_>>| -> Result<Option<Line>, CalibrateError> {
        let n = records.len();
        if n == 0 {
            return Ok(None);
        }
        let coded = LayerExperts::Coded { layer, records };
        let experts = backend.load_experts(coded, shape, Form::Fused)?;
        let sizes = (shape.hidden, n, top_k.min(n));
        Ok(Some(line(backend, &experts, sizes, seconds)?))
    };
    let (ans, plane3) = (coded(rans)?, coded(plane3)?);
    let either = ans.or(plane3).unwrap_or(hot);
    let of_plane3 = plane3.unwrap_or(either);

    let exchanged = round_trip(backend, config)?;
    let (dense, dense_two, round_trip) =
        match token(backend, archive, dir, config, (&either, &of_plane3))? {
            Some(passes) => {
                if let Some(in_layer) = passes.hot {
                    let alone = hot.at(config.router.top_k as f64);
                    hot.fixed = (hot.fixed + in_layer - alone).max(0.0);
                }
                let [one, two] = passes.dense;
                (one, Some(two), exchanged.max(passes.host))
            }
            None => (dense(backend, config, part, seconds)?, None, exchanged),
        };
    Ok(Rates {
        hot,
        ans: ans.unwrap_or(either),
        plane3: of_plane3,
        // The tokens come to the host, and what becomes of them goes back.
        cpu: Line {
            fixed: cpu_line.fixed + exchanged,
            ..cpu_line
        },
        upload: upload(device)?,
        disk: disk(archive)?,
        round_trip,
        exchange: exchange(backend, config)?,
        dense,
        dense_two,
    })
}

/// Experts on the CPU as a layer in tiers computes them: weights that no cache holds, threads that
/// sleep until there is work.
fn cpu(archive: &Archive, top_k: usize) -> Result<Line, CalibrateError> {
    let shape = *archive.shape();
    let layer = archive.layer(archive.layers()[0])?;
    let n = archive.experts().min(4 * top_k);
    let raw = (0..n).map(|e| {
        going()?;
        Ok(layer.record(e)?.decode_all()?)
    });
    let raw = raw.collect::<Result<Vec<_>, CalibrateError>>()?;
    let cpu = Cpu::new()?;
    let experts = cpu.load_experts(LayerExperts::Raw(raw), shape, Form::Fused)?;
    let x = Rng::new(5).normals(top_k * shape.hidden);
    let mut next = 0;
    let mut time = |k: usize| -> Result<f64, CalibrateError> {
        let mut times = Vec::with_capacity(RUNS);
        for _ in 0..RUNS {
            going()?;
            let ids: Vec<u32> = (0..k).map(|i| ((next + i) % n) as u32).collect();
            next += k;
            std::thread::sleep(std::time::Duration::from_millis(1));
            let start = Instant::now();
            let x = cpu.upload(&x[..k * shape.hidden])?;
            let (ids, ones) = (cpu.upload(&ids)?, cpu.upload(&vec![1.0f32; k])?);
            let mut out = cpu.alloc::<f32>(k * shape.hidden)?;
            let to = rows_mut(&mut out, shape.hidden);
            cpu.experts(&experts, rows(&x, shape.hidden), &ids, &ones, 1, k, to)?;
            black_box(&out);
            times.push(start.elapsed().as_secs_f64());
        }
        Ok(median(times))
    };
    let (one, all) = (time(1)?, time(top_k)?);
    Ok(if top_k == 1 {
        Line {
            fixed: 0.0,
            each: one,
        }
    } else {
        Line::through((1.0, one), (top_k as f64, all))
    })
}

/// Time of a layer's experts by how many a token chooses.
fn line<B: LoadExperts>(
    backend: &B,
    experts: &B::Experts,
    (hidden, n, top_k): (usize, usize, usize),
    mut seconds: impl FnMut(&mut dyn FnMut() -> Result<(), B::Error>) -> Result<f64, B::Error>,
) -> Result<Line, CalibrateError>
where
    CalibrateError: From<B::Error>,
{
    let x = backend.upload(&Rng::new(5).normals(hidden))?;
    let mut out = backend.alloc::<f32>(hidden)?;
    let mut time = |k: usize| {
        let weights = backend.upload(&vec![1.0f32 / k as f32; k])?;
        let mut times = Vec::with_capacity(RUNS);
        for run in 0..=RUNS {
            going()?;
            let mut ids: Vec<u32> = (0..k).map(|i| ((run * k + i) % n) as u32).collect();
            ids.sort_unstable();
            let ids = backend.upload(&ids)?;
            let took = seconds(&mut || {
                let (x, out) = (rows(&x, hidden), rows_mut(&mut out, hidden));
                backend.experts(experts, x, &ids, &weights, k, 1, out)
            })?;
            if run > 0 {
                times.push(took);
            }
        }
        Ok::<_, CalibrateError>(median(times))
    };
    let (one, all) = (time(1)?, time(top_k)?);
    Ok(if top_k == 1 {
        Line {
            fixed: 0.0,
            each: one,
        }
    } else {
        Line::through((1.0, one), (top_k as f64, all))
    })
}

/// Copies of 256 KiB and of 64 MiB from pinned memory.
fn upload<D: Device>(device: &D) -> Result<Line, DeviceError> {
    let (small, large) = (256 << 10, 64 << 20);
    let memory = device.allocate(large)?;
    let data = device.allocate_host(large)?;
    let time = |n: usize| {
        let mut times = Vec::new();
        for _ in 0..5 {
            let start = Instant::now();
            device.fork()?;
            // SAFETY: nothing else uses either, and both outlive the copy, which is waited for.
            unsafe { device.copy_beside(&memory, 0, &data, 0..n)? };
            device.join()?;
            device.synchronize()?;
            times.push(start.elapsed().as_secs_f64());
        }
        Ok::<_, DeviceError>(median(times))
    };
    Ok(Line::through(
        (small as f64, time(small)?),
        (large as f64, time(large)?),
    ))
}

/// Reads of records as a layer asks for them: one now and then, by the reader that it asks. Several at once would be
/// faster in all.
fn disk(archive: &Archive) -> Result<Line, CalibrateError> {
    const MOST: usize = 256 << 20;
    let read_error = |source| CalibrateError::Read {
        path: archive.path().into(),
        source,
    };
    let file = Arc::new(DirectFile::open(archive.path()).map_err(read_error)?);
    let reads = Reads::new(Way::Ring);
    let mut rng = Rng::new(11);
    let mut some = |n: usize| (rng.bits() % n as u64) as usize;
    let mut record = || {
        let layer = archive.layers()[some(archive.layers().len())];
        archive.place_of(layer, some(archive.experts()))
    };
    // Pages that are there, as pinned ones are.
    let largest = archive.shape().raw_bytes();
    let mut rooms = vec![Aligned::new(read_slot(largest))];
    rooms[0].fill(1);
    let mut read = |offset: u64, len: usize| {
        going()?;
        let enough = |room: &Aligned| room.len() >= read_slot(len);
        let room = rooms.pop().filter(enough);
        let room = room.unwrap_or_else(|| Aligned::new(read_slot(len)));
        let asked = Read {
            number: 0,
            offset,
            len,
            room,
        };
        let start = Instant::now();
        let done = reads.start(&file, vec![asked]).recv();
        let seconds = start.elapsed().as_secs_f64();
        let lost = || std::io::Error::other("the thread that reads has panicked");
        let done = done.map_err(|_| read_error(lost()))?;
        done.bytes.map_err(read_error)?;
        rooms.push(done.room);
        Ok::<_, CalibrateError>(seconds)
    };
    let small = (0..RUNS).map(|_| {
        let (at, bytes) = record()?;
        read(at, bytes.min(BLOCK))
    });
    let small = median(small.collect::<Result<_, CalibrateError>>()?);
    let (mut bytes, mut seconds, mut n) = (0, 0.0, 0);
    while n == 0 || bytes < MOST && n < 64 {
        let (at, len) = record()?;
        // A disk that was idle for as long as a token takes otherwise.
        std::thread::sleep(Duration::from_millis(5));
        seconds += read(at, len)?;
        (bytes, n) = (bytes + len, n + 1);
    }
    let n = f64::from(n);
    Ok(Line::through(
        (BLOCK as f64, small),
        (bytes as f64 / n, seconds / n),
    ))
}

/// Reading what a layer chose, and writing what is to be done about it.
fn round_trip<D: Device>(backend: &KernelBackend<D>, config: &Config) -> Result<f64, KernelError> {
    let ids = backend.alloc::<u32>(config.router.top_k)?;
    let mut plan = backend.alloc::<u32>(64 * config.router.top_k)?;
    let mut host = vec![0; config.router.top_k];
    let words = vec![0; 64 * config.router.top_k];
    let mut times = Vec::new();
    for _ in 0..3 * RUNS {
        let start = Instant::now();
        backend.read(&ids, 0, &mut host)?;
        backend.write(&mut plan, 0, &words)?;
        times.push(start.elapsed().as_secs_f64());
    }
    Ok(median(times))
}

/// A layer's activations off a device and its experts' results back onto it, through the host.
fn exchange<D: Device>(backend: &KernelBackend<D>, config: &Config) -> Result<Line, KernelError> {
    let most = config.router.top_k.max(2);
    let mut rows = backend.alloc::<f32>(most * config.hidden)?;
    let mut host = vec![0.0; most * config.hidden];
    let mut time = |n: usize| {
        let host = &mut host[..n * config.hidden];
        let mut times = Vec::new();
        for _ in 0..3 * RUNS {
            let start = Instant::now();
            backend.read(&rows, 0, host)?;
            backend.write(&mut rows, 0, host)?;
            times.push(start.elapsed().as_secs_f64());
        }
        Ok::<_, KernelError>(median(times))
    };
    Ok(Line::through((1.0, time(1)?), (most as f64, time(most)?)))
}

/// What a layer's exchange takes between the first device and another: each waits for the other, and
/// what one cannot read of the other's memory is copied.
pub fn exchange_between<D: Device>(
    first: &D,
    other: &D,
    config: &Config,
) -> Result<Line, KernelError> {
    const LAYERS: usize = 50;
    let row = 4 * config.hidden;
    let most = config.router.top_k.max(2);
    let (here, there) = (first.allocate(most * row)?, other.allocate(most * row)?);
    let time = |n: usize| -> Result<f64, DeviceError> {
        let mut times = Vec::new();
        for _ in 0..RUNS {
            let start = first.event()?;
            for _ in 0..LAYERS {
                other.wait_for(first)?;
                let copied = !other.reaches(first);
                if copied {
                    // SAFETY: nobody writes here; each waits for the other.
                    unsafe { other.copy_from(first, (&here, 0), (&there, 0), row)? };
                }
                first.wait_for(other)?;
                if copied {
                    // SAFETY: as above.
                    unsafe { first.copy_from(other, (&there, 0), (&here, 0), n * row)? };
                }
            }
            let end = first.event()?;
            times.push(first.elapsed(&start, &end)? / LAYERS as f64);
        }
        other.synchronize()?;
        Ok(median(times))
    };
    let line = Line::through((1.0, time(1)?), (most as f64, time(most)?));
    first.synchronize()?;
    Ok(line)
}

/// The dense part of a token with its launches and what the host does for them, and that of a pass over two
/// tokens: measured with the first layers of the model itself, up to the first one with routed experts.
/// `None` where there is no memory for them.
///
/// A pass of those layers, less one of those without experts, less the experts' own time, is a layer: what one
/// pass takes longer than the next one, by turns, since it is to be multiplied by the number of layers and a
/// device's clocks drift. Beside coded experts a shared expert costs little; int4 is short of the same memory as
/// it, so that a layer with int4 is measured too. What a layer takes longer where the host must learn what was
/// chosen is the host's part in it.
fn token<D: Device + Clone + 'static>(
    backend: &KernelBackend<D>,
    archive: &Archive,
    dir: &Path,
    config: &Config,
    (rans, plane3): (&Line, &Line),
) -> Result<Option<Passes>, CalibrateError> {
    let kinds = &config.layers;
    let Some(first) = kinds.iter().position(|kind| kind.sparse) else {
        return Ok(None);
    };
    let mut part = config.clone();
    part.mtp = false;
    part.batch = part.batch.max(2);
    part.layers.truncate(first + 1);
    let source = Source::Coded(Archive::open(archive.path())?);
    let fresh = KernelBackend::new(backend.device().clone())?;
    let loaded = Model::load(fresh, dir, part, &source, Form::Fused, |_| ());
    let mut model = match loaded {
        Ok(model) => model,
        Err(e) if out_of_memory(&e) => {
            tracing::warn!("no memory to measure a layer with: the dense part is estimated");
            return Ok(None);
        }
        Err(e) => return Err(e.into()),
    };
    const WARM: usize = 3;
    const PASSES: usize = WARM + 2 * RUNS;
    let wanted = |tokens| match tokens {
        1 => Wanted::Last,
        n => Wanted::Tail(n),
    };
    let ids = |pass: usize, tokens: usize| -> Vec<u32> {
        (pass * tokens..(pass + 1) * tokens)
            .map(|t| ((t * 7919 + 11) % config.vocab) as u32)
            .collect()
    };
    type Sessions<D> = Session<KernelBackend<D>>;
    let logits = RefCell::new(Vec::new());
    let pass = |model: &Model<KernelBackend<D>>, session: &mut Sessions<D>, n, tokens| {
        going()?;
        let start = Instant::now();
        model.forward_into(
            session,
            &ids(n, tokens),
            wanted(tokens),
            &mut logits.borrow_mut(),
        )?;
        Ok::<_, CalibrateError>(start.elapsed().as_secs_f64())
    };
    // A pass, one without the last layer, and what the first takes longer, where least came between.
    let both = |model: &mut Model<KernelBackend<D>>, tokens: usize| {
        let room = tokens * PASSES;
        let mut with = model.session(room, wanted(tokens))?;
        let mut without = model.without_last_layer(|m| m.session(room, wanted(tokens)))?;
        let mut pairs = Vec::with_capacity(PASSES);
        for n in 0..PASSES {
            let long = pass(model, &mut with, n, tokens)?;
            let short = model.without_last_layer(|m| pass(m, &mut without, n, tokens))?;
            pairs.push((long, short));
        }
        Ok::<_, CalibrateError>(undisturbed(pairs.split_off(WARM)))
    };
    let [one, two] = [both(&mut model, 1)?, both(&mut model, 2)?];
    let experts = archive.experts();
    let file = DirectFile::buffered(archive.path());
    let file = Arc::new(file.map_err(|source| CalibrateError::Read {
        path: archive.path().to_owned(),
        source,
    })?);
    let mut tiers = vec![Tier::VramAns; experts];
    if let Some(last) = tiers.last_mut() {
        *last = Tier::RamAns;
    }
    let host = match model.tier_last_layer(archive, &file, &tiers) {
        Ok(true) => {
            let mut session = model.session(PASSES, Wanted::Last)?;
            let mut times = (0..PASSES)
                .map(|n| pass(&model, &mut session, n, 1))
                .collect::<Result<Vec<_>, _>>()?;
            median(calm(times.split_off(WARM), |t| *t)) - one[0]
        }
        Ok(false) => 0.0,
        Err(e) if out_of_memory(&e) => 0.0,
        Err(e) => return Err(e.into()),
    };
    tiers.fill(Tier::VramHot);
    let placed = model.tier_last_layer(archive, &file, &tiers);
    let hot = match placed.map_err(CalibrateError::from) {
        Ok(true) => both(&mut model, 1).map(Some),
        Ok(false) => Ok(None),
        Err(e) => Err(e),
    };
    let hot = match hot {
        Err(CalibrateError::Model(e)) if out_of_memory(&e) => Err(()),
        Err(CalibrateError::Kernel(e)) if lacks_memory(&e) => Err(()),
        other => Ok(other?),
    };
    if hot.is_err() {
        tracing::warn!("no memory to measure a layer in int4 with: int4 is measured by itself");
    }
    let hot = hot.unwrap_or(None);
    let of_plane3 = (0..experts)
        .map(|e| archive.is_plane3(first as u32, e))
        .try_fold(0, |n, kind| Ok::<_, ArchiveError>(n + usize::from(kind?)))?;
    let share = of_plane3 as f64 / experts as f64;
    // As many as one token chooses, or two that choose independently.
    let (k, all) = (config.router.top_k as f64, experts as f64);
    let chosen = [k, all * (1.0 - (1.0 - k / all).powi(2))];
    let of_experts = |i: usize| share * plane3.at(chosen[i]) + (1.0 - share) * rans.at(chosen[i]);
    let of = |i: usize| {
        let [_, without, layer] = [one, two][i];
        without + (kinds.len() - first) as f64 * (layer - of_experts(i)).max(0.0)
    };
    let of_a_layer = (one[2] - of_experts(0)).max(0.0);
    Ok(Some(Passes {
        dense: [of(0), of(1)],
        hot: hot.map(|[_, _, layer]| (layer - of_a_layer).max(0.0)),
        host,
    }))
}

/// What [`token`] finds. Seconds.
struct Passes {
    /// A pass over one token and over two, without routed experts.
    dense: [f64; 2],
    /// Experts in int4 that a token chooses, in a layer.
    hot: Option<f64>,
    /// The host's part in a layer.
    host: f64,
}

/// Whether there was no room for something, on a device or in pinned memory.
fn out_of_memory(e: &ModelError) -> bool {
    let ModelError::Place { source, .. } = e else {
        return false;
    };
    source.downcast_ref().is_some_and(lacks_memory)
}

fn lacks_memory(e: &KernelError) -> bool {
    match e {
        KernelError::Device(e) => {
            e.is_out_of_memory() || matches!(e, DeviceError::HostMemory { .. })
        }
        _ => false,
    }
}

/// Launches of a layer that are not its routed experts'.
const LAUNCHES: f64 = 25.0;

/// The dense part of a token, estimated: its bytes at the rate of one large matrix of their kind, f32 at that of
/// bf16, and its launches.
fn dense<D: Device>(
    backend: &KernelBackend<D>,
    config: &Config,
    part: &DensePart,
    mut seconds: impl FnMut(&mut dyn FnMut() -> Result<(), KernelError>) -> Result<f64, KernelError>,
) -> Result<f64, CalibrateError> {
    let cols = config.hidden;
    let x = backend.upload(&Rng::new(7).normals(cols))?;
    let most = config.vocab;
    let mut out = backend.alloc::<f32>(most)?;
    let mut a_byte = |weight: Weight<'_, KernelBackend<D>>, size: usize, rows_of: usize| {
        let mut times = Vec::new();
        for _ in 0..RUNS {
            going()?;
            times.push(seconds(&mut || {
                let (x, out) = (rows(&x, cols), rows_mut(&mut out, rows_of));
                backend.linear(x, weight, rows_of, cols, 1, false, out)
            })?);
        }
        Ok::<_, CalibrateError>(median(times) / (size * rows_of * cols) as f64)
    };
    let mut bytes = 0.0;
    if part.floats > 0 {
        let rows_of = ((256 << 20) / (2 * cols)).min(most);
        let weight = backend.alloc::<u16>(rows_of * cols)?;
        bytes += part.floats as f64 * a_byte(Weight::Bf16(&weight), 2, rows_of)?;
    }
    if part.int8 > 0 {
        let rows_of = ((256 << 20) / cols).min(most);
        let weight = backend.alloc::<i8>(rows_of * cols)?;
        let scales = backend.alloc::<f32>(rows_of)?;
        let weight = Weight::Int8 {
            bytes: &weight,
            scales: &scales,
        };
        bytes += part.int8 as f64 * a_byte(weight, 1, rows_of)?;
    }
    const MANY: usize = 64;
    let mut times = Vec::new();
    for _ in 0..RUNS {
        going()?;
        times.push(seconds(&mut || {
            (0..MANY).try_for_each(|_| {
                let (x, out) = (rows(&x, 64), rows_mut(&mut out, 64));
                backend.add(x, None, 64, 1, out)
            })
        })?);
    }
    let a_launch = median(times) / MANY as f64;
    let launches = LAUNCHES * config.layers.len() as f64;
    Ok(bytes + launches * a_launch)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disturbed_passes_do_not_count() {
        // 10 and 7, slowly drifting; of six pairs in ten the shorter one was disturbed, by more each time.
        let pairs: Vec<(f64, f64)> = (0..10)
            .map(|n| {
                let disturbed = if n % 5 < 3 { 1.0 + f64::from(n) } else { 0.0 };
                let drift = 0.01 * f64::from(n);
                (10.0 + drift, 7.0 + drift + disturbed)
            })
            .collect();
        let plain = median(pairs.iter().map(|p| p.0 - p.1).collect());
        assert!(plain < 2.5, "{plain}");
        let [long, short, more] = undisturbed(pairs);
        assert!((10.0..10.1).contains(&long) && (7.0..7.1).contains(&short));
        assert!((more - 3.0).abs() < 1e-9, "{more}");
    }
}
