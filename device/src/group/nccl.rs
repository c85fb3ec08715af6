//! GPUs, by NCCL: a communicator that never blocks, so that every wait of ours has a deadline.
//!
//! Invariants:
//! - A communicator is destroyed or aborted once, and not used after. What it still had on the stream is over then.
//! - The host never is more than [`AHEAD`] calls ahead of the stream, and waits for it with a deadline: a driver whose queue
//!   is full would wait without one.

use std::ffi::{CStr, c_int, c_uint, c_void};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cudarc::driver::result::{DriverError, event};
use cudarc::driver::sys as driver_sys;
use cudarc::nccl::{result as nccl, sys};

use super::waiting::Waiting;
use super::{Members, Part, Patience, failed};
use crate::cuda::{Cuda, Library};
use crate::device::Device;
use crate::error::{DeviceError, Result};
use crate::inventory::OLDEST_NCCL;

/// What tells NCCL that a configuration is one.
const MAGIC: c_uint = 0xcafe_beef;
/// Leaves a choice to NCCL.
const UNDEFINED: c_int = c_int::MIN;
/// The version whose configuration cudarc describes, as NCCL counts.
const DESCRIBED: c_int = 23_000;
/// Most calls of a member that the stream has not done.
const AHEAD: usize = 4;
/// Pause between two looks at something that is under way: far below what a bucket takes.
const PAUSE: Duration = Duration::from_micros(50);
/// How long leaving may take before it is done by force.
const LEAVING: Duration = Duration::from_secs(10);

/// A member of a group.
#[derive(Debug)]
pub(super) struct Communicator {
    device: Device,
    rank: usize,
    world: usize,
    patience: Patience,
    /// Ends every wait: somebody wants to abort.
    leaving: AtomicBool,
    joined: Mutex<Joined>,
}

#[derive(Debug)]
struct Joined {
    /// `None` once it was aborted.
    raw: Option<Raw>,
    /// How many calls the stream was given.
    calls: usize,
    /// Behind each of the last calls, by its number.
    done: [Option<Mark>; AHEAD],
}

#[derive(Clone, Copy, Debug)]
struct Raw(sys::ncclComm_t);

/// A place on the stream.
#[derive(Debug)]
struct Mark(driver_sys::CUevent);

// SAFETY: an event may be used from any thread.
#[expect(unsafe_code, reason = "a pointer of the driver")]
unsafe impl Send for Mark {}

impl Drop for Mark {
    #[expect(unsafe_code, reason = "calls of the driver")]
    fn drop(&mut self) {
        // SAFETY: it is used no more; one that is not reached yet goes when it is.
        let _ = unsafe { event::destroy(self.0) };
    }
}

// SAFETY: a communicator may be used from any thread, one at a time, which the lock sees to.
#[expect(unsafe_code, reason = "a pointer of NCCL")]
unsafe impl Send for Raw {}

/// How a call of NCCL ended, or that it goes on.
enum Answer {
    Done,
    UnderWay,
    Failed(Failure),
}

/// Why a call failed.
struct Failure {
    reason: String,
    /// Whether it is of this member's own making, whoever the others are.
    own: bool,
}

/// The 128 bytes that members find each other by.
pub(super) fn new_id(device: &Device) -> Result<Vec<u8>> {
    cuda(device)?.bind()?;
    check(device)?;
    let id = nccl::get_uniqueid()
        .map_err(|error| failed(device, "ncclGetUniqueId", Duration::ZERO, last(error.0, None).reason))?;
    Ok(id.internal.iter().map(|byte| byte.cast_unsigned()).collect())
}

impl Communicator {
    #[expect(unsafe_code, reason = "calls of NCCL")]
    pub(super) fn join(
        device: &Device,
        id: &[u8],
        (rank, world): (usize, usize),
        patience: Patience,
    ) -> Result<Self> {
        let refused = |reason: String| failed(device, "join", Duration::ZERO, reason);
        check(device)?;
        cuda(device)?.bind()?;
        let internal: [u8; 128] = id
            .try_into()
            .map_err(|_| refused(format!("an identifier has 128 bytes and not {}", id.len())))?;
        let id = sys::ncclUniqueId { internal: internal.map(|byte| byte.cast_signed()) };
        let version = version().map_err(&refused)?;
        let mut config = config(version);
        let mut raw = std::ptr::null_mut();
        let int = |number: usize| c_int::try_from(number).unwrap_or(c_int::MAX);
        // SAFETY: the configuration is as NCCL lays it out, and read before the call returns.
        let answer =
            unsafe { sys::ncclCommInitRankConfig(&raw mut raw, int(world), id, int(rank), &raw mut config) };
        if raw.is_null() {
            return Err(refused(last(answer, None).reason));
        }
        let joined = Joined { raw: Some(Raw(raw)), calls: 0, done: [const { None }; AHEAD] };
        let communicator = Self {
            device: device.clone(),
            rank,
            world,
            patience,
            leaving: AtomicBool::new(false),
            joined: Mutex::new(joined),
        };
        let joined =
            communicator.settle(Raw(raw), answer, "join", &mut Waiting::begin(&communicator.patience));
        if joined.is_err() {
            communicator.abort();
        }
        joined.map(|()| communicator)
    }

    /// Makes calls as one, and waits until NCCL has given them to the stream.
    fn together(
        &self,
        operation: &'static str,
        calls: impl FnOnce(sys::ncclComm_t, sys::cudaStream_t) -> sys::ncclResult_t,
    ) -> Result<()> {
        let cuda = cuda(&self.device)?;
        cuda.bind()?;
        let mut joined = self.joined();
        let raw = self.living(&joined, operation)?;
        let mut waiting = Waiting::begin(&self.patience);
        self.keep_pace(&joined, raw, operation, &mut waiting)?;
        let fails =
            |error: nccl::NcclError| self.because(operation, Duration::ZERO, last(error.0, Some(raw)));
        nccl::group_start().map_err(fails)?;
        let called = calls(raw.0, cuda.stream().cast());
        // What was begun has to be ended even if it failed.
        let ended = match nccl::group_end() {
            Ok(nccl::NcclStatus::InProgress) => sys::ncclResult_t::ncclInProgress,
            Ok(_) => sys::ncclResult_t::ncclSuccess,
            Err(error) => error.0,
        };
        if let Answer::Failed(failure) = answer(called, Some(raw)) {
            return Err(self.because(operation, Duration::ZERO, failure));
        }
        self.settle(raw, ended, operation, &mut waiting)?;
        self.mark(&mut joined, cuda)
    }

    /// Waits until there is room for one more call among those that the stream has not done.
    #[expect(unsafe_code, reason = "calls of the driver")]
    fn keep_pace(
        &self,
        joined: &Joined,
        raw: Raw,
        operation: &'static str,
        waiting: &mut Waiting<'_>,
    ) -> Result<()> {
        let Some(Mark(oldest)) = &joined.done[joined.calls % AHEAD] else { return Ok(()) };
        // SAFETY: the event lives.
        let reached = || match unsafe { event::query(*oldest) } {
            Ok(()) => Ok(true),
            Err(DriverError(driver_sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(error) => Err(self.broken("cuEventQuery", error)),
        };
        self.until(raw, operation, waiting, reached)
    }

    /// Notes where the stream has done the call that it was given last.
    #[expect(unsafe_code, reason = "calls of the driver")]
    fn mark(&self, joined: &mut Joined, cuda: &Cuda) -> Result<()> {
        let place = &mut joined.done[joined.calls % AHEAD];
        joined.calls += 1;
        let mark = match place.take() {
            Some(mark) => mark,
            None => Mark(
                event::create(driver_sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
                    .map_err(|error| self.broken("cuEventCreate", error))?,
            ),
        };
        // SAFETY: event and stream live.
        unsafe { event::record(mark.0, cuda.stream()) }
            .map_err(|error| self.broken("cuEventRecord", error))?;
        *place = Some(mark);
        Ok(())
    }

    /// Waits for something that the stream will have done.
    fn until(
        &self,
        raw: Raw,
        operation: &'static str,
        waiting: &mut Waiting<'_>,
        mut reached: impl FnMut() -> Result<bool>,
    ) -> Result<()> {
        loop {
            let there = reached()?;
            let over = match self.state(raw) {
                Answer::Done if there => return Ok(()),
                Answer::Failed(failure) => Some(failure),
                Answer::Done | Answer::UnderWay => self.over(waiting),
            };
            if let Some(failure) = over {
                return Err(self.because(operation, waiting.started.elapsed(), failure));
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Why a wait is over, if it is.
    fn over(&self, waiting: &mut Waiting<'_>) -> Option<Failure> {
        let left = || "this member leaves".to_owned();
        let leaving = self.leaving.load(Ordering::Relaxed).then(left);
        let reason = leaving.or_else(|| waiting.over(|| self.missing()))?;
        Some(Failure { reason, own: false })
    }

    fn living(&self, joined: &Joined, operation: &'static str) -> Result<Raw> {
        let gone = || self.failed(operation, Duration::ZERO, "it was aborted".to_owned());
        joined.raw.ok_or_else(gone)
    }

    /// Waits until a call is no longer under way.
    fn settle(
        &self,
        raw: Raw,
        first: sys::ncclResult_t,
        operation: &'static str,
        waiting: &mut Waiting<'_>,
    ) -> Result<()> {
        let mut state = answer(first, Some(raw));
        loop {
            let over = match state {
                Answer::Done => return Ok(()),
                Answer::Failed(failure) => Some(failure),
                Answer::UnderWay => self.over(waiting),
            };
            if let Some(failure) = over {
                return Err(self.because(operation, waiting.started.elapsed(), failure));
            }
            std::thread::sleep(PAUSE);
            state = self.state(raw);
        }
    }

    /// How the communicator is.
    #[expect(unsafe_code, reason = "calls of NCCL")]
    fn state(&self, raw: Raw) -> Answer {
        let mut state: c_int = 0;
        // SAFETY: the communicator lives, and a result is an int.
        let asked = unsafe { sys::ncclCommGetAsyncError(raw.0, (&raw mut state).cast()) };
        match (answer(asked, Some(raw)), state) {
            (Answer::Failed(failure), _) => Answer::Failed(failure),
            (_, 0) => Answer::Done,
            (_, state) if state == sys::ncclResult_t::ncclInProgress as c_int => Answer::UnderWay,
            (_, state) => {
                let own = OWN.iter().any(|own| *own as c_int == state);
                Answer::Failed(Failure { reason: said(&format!("NCCL's error {state}"), Some(raw)), own })
            }
        }
    }

    /// Whether the stream has nothing to do any more.
    fn idle(&self) -> Result<bool> {
        cuda(&self.device)?.is_idle()
    }

    fn broken(&self, call: &'static str, error: DriverError) -> DeviceError {
        DeviceError::Call { device: self.device.name(), call, reason: format!("{error:?}") }
    }

    fn missing(&self) -> String {
        let Self { rank, world, .. } = self;
        format!(
            "not all of the {world} members came or answered (this is member {rank}): see whether their processes live"
        )
    }

    fn failed(&self, operation: &'static str, waited: Duration, reason: String) -> DeviceError {
        failed(&self.device, operation, waited, reason)
    }

    fn because(&self, operation: &'static str, waited: Duration, failure: Failure) -> DeviceError {
        // Errors of CUDA come from the memory of a member that has died, too: its own are those that stay.
        if failure.own || self.idle().is_err() {
            return DeviceError::Call { device: self.device.name(), call: operation, reason: failure.reason };
        }
        self.failed(operation, waited, failure.reason)
    }

    fn joined(&self) -> MutexGuard<'_, Joined> {
        self.joined.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Members for Communicator {
    #[expect(unsafe_code, reason = "calls of NCCL")]
    fn broadcast(&self, root: usize, part: Part) -> Result<()> {
        let (pointer, root) = (part.address as *mut c_void, c_int::try_from(root).unwrap_or(c_int::MAX));
        // SAFETY: the part is of a buffer that lives, and used in the order of the stream.
        self.together("broadcast", |raw, stream| unsafe {
            sys::ncclBroadcast(pointer, pointer, part.bytes, BYTES, root, raw, stream)
        })
    }

    #[expect(unsafe_code, reason = "calls of NCCL")]
    fn all_gather(&self, own: Part, cuts: &[Range<usize>], all: Part) -> Result<()> {
        // SAFETY: all parts are of buffers that live, and used in the order of the stream.
        self.together("all_gather", |raw, stream| unsafe {
            if even(cuts, all.bytes) {
                return sys::ncclAllGather(pointer(own), pointer(all), own.bytes, BYTES, raw, stream);
            }
            let send = |(root, cut): (usize, &Range<usize>)| {
                let to = all.slice(cut);
                let from = if root == self.rank { own } else { to };
                sys::ncclBroadcast(pointer(from), pointer(to), to.bytes, BYTES, root as c_int, raw, stream)
            };
            first_failure(cuts.iter().enumerate().filter(|(_, cut)| !cut.is_empty()).map(send))
        })
    }

    #[expect(unsafe_code, reason = "calls of NCCL")]
    fn reduce_scatter(&self, values: Part, cuts: &[Range<usize>], own: Part) -> Result<()> {
        let (floats, sum) = (sys::ncclDataType_t::ncclFloat32, sys::ncclRedOp_t::ncclSum);
        // SAFETY: all parts are of buffers that live, and used in the order of the stream.
        self.together("reduce_scatter", |raw, stream| unsafe {
            if even(cuts, values.bytes) {
                let count = own.bytes / size_of::<f32>();
                return sys::ncclReduceScatter(
                    pointer(values),
                    pointer(own),
                    count,
                    floats,
                    sum,
                    raw,
                    stream,
                );
            }
            let reduce = |(root, cut): (usize, &Range<usize>)| {
                let (from, count) = (values.slice(cut), cut.len() / size_of::<f32>());
                sys::ncclReduce(pointer(from), pointer(own), count, floats, sum, root as c_int, raw, stream)
            };
            first_failure(cuts.iter().enumerate().filter(|(_, cut)| !cut.is_empty()).map(reduce))
        })
    }

    fn wait(&self, operation: &'static str) -> Result<()> {
        let joined = self.joined();
        let raw = self.living(&joined, operation)?;
        self.until(raw, operation, &mut Waiting::begin(&self.patience), || self.idle())
    }

    #[expect(unsafe_code, reason = "calls of NCCL")]
    fn abort(&self) {
        self.leaving.store(true, Ordering::Relaxed);
        let Some(raw) = self.joined().raw.take() else { return };
        if cuda(&self.device).is_ok_and(|cuda| cuda.bind().is_ok()) {
            // SAFETY: the communicator lives, and nobody has it any more.
            let _ = unsafe { sys::ncclCommAbort(raw.0) };
            // Its kernels end now; memory that they write is used for something else soon.
            let started = Instant::now();
            while started.elapsed() < LEAVING && self.idle().is_ok_and(|idle| !idle) {
                std::thread::sleep(PAUSE);
            }
        }
    }
}

impl Communicator {
    /// Leaves the others, in good order if they let it.
    #[expect(unsafe_code, reason = "calls of NCCL")]
    fn leave(&self) {
        let Some(raw) = self.joined().raw else { return };
        // Others may still read what this one has sent: it leaves with them, unless they do not.
        // SAFETY: the communicator lives.
        let begun = unsafe { sys::ncclCommFinalize(raw.0) };
        let patience = Patience::from(self.patience.deadline.min(LEAVING));
        if self.settle(raw, begun, "leave", &mut Waiting::begin(&patience)).is_err() {
            return self.abort();
        }
        self.joined().raw = None;
        // SAFETY: it was finalized, and nobody has it any more.
        let _ = unsafe { sys::ncclCommDestroy(raw.0) };
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if cuda(&self.device).is_ok_and(|cuda| cuda.bind().is_err()) {
            return;
        }
        self.leave();
        // Before the device, which may go with this value.
        self.joined().done = [const { None }; AHEAD];
    }
}

const BYTES: sys::ncclDataType_t = sys::ncclDataType_t::ncclUint8;

fn pointer(part: Part) -> *mut c_void {
    part.address as *mut c_void
}

/// Whether all ranges are of one length and cover everything in order.
fn even(cuts: &[Range<usize>], all: usize) -> bool {
    let len = all / cuts.len().max(1);
    len > 0
        && len * cuts.len() == all
        && cuts.iter().enumerate().all(|(rank, cut)| *cut == (rank * len..(rank + 1) * len))
}

/// Makes all calls, in order; the first that fails, if any does.
fn first_failure(calls: impl Iterator<Item = sys::ncclResult_t>) -> sys::ncclResult_t {
    use sys::ncclResult_t::{ncclInProgress, ncclSuccess};
    let results: Vec<_> = calls.collect();
    results.into_iter().find(|result| ![ncclInProgress, ncclSuccess].contains(result)).unwrap_or(ncclSuccess)
}

fn cuda(device: &Device) -> Result<&Cuda> {
    let cuda = device.inner.backend.as_any().downcast_ref::<Cuda>();
    cuda.ok_or_else(|| failed(device, "join", Duration::ZERO, "it is no GPU".to_owned()))
}

/// Whether NCCL is there.
pub(super) fn check(device: &Device) -> Result<()> {
    let there = Library::Nccl.check().and_then(|()| version().map(drop));
    there.map_err(|reason| DeviceError::Unavailable { device: device.name(), reason })
}

/// As 22809 for 2.28.9. The library is there.
fn version() -> std::result::Result<c_int, String> {
    let version = nccl::get_nccl_version().map_err(|error| last(error.0, None).reason)?;
    if version < OLDEST_NCCL {
        return Err(format!(
            "libnccl.so is of version {version}, and has to be of {OLDEST_NCCL} (2.14) or later"
        ));
    }
    Ok(version)
}

/// Failures that are this member's own: its calls are at fault.
const OWN: [sys::ncclResult_t; 2] =
    [sys::ncclResult_t::ncclInvalidArgument, sys::ncclResult_t::ncclInvalidUsage];

fn answer(result: sys::ncclResult_t, raw: Option<Raw>) -> Answer {
    match result {
        sys::ncclResult_t::ncclSuccess => Answer::Done,
        sys::ncclResult_t::ncclInProgress => Answer::UnderWay,
        result => Answer::Failed(last(result, raw)),
    }
}

/// What NCCL says of a failure.
fn last(result: sys::ncclResult_t, raw: Option<Raw>) -> Failure {
    Failure { reason: said(&format!("{result:?}"), raw), own: OWN.contains(&result) }
}

/// The same with its last words, and what helps where that is known.
#[expect(unsafe_code, reason = "calls of NCCL")]
fn said(what: &str, raw: Option<Raw>) -> String {
    let raw = raw.map_or(std::ptr::null_mut(), |raw| raw.0);
    // SAFETY: no communicator is as good as one that lives.
    let words = unsafe { sys::ncclGetLastError(raw) };
    let words = if words.is_null() {
        String::new()
    } else {
        // SAFETY: a text of NCCL's with a zero at its end.
        unsafe { CStr::from_ptr(words) }.to_string_lossy().trim().to_owned()
    };
    let hint = if words.contains("Duplicate GPU") {
        "; every member needs a GPU of its own: between processes on one GPU use weights.transport = \"cuda-ipc\""
    } else {
        "; NCCL_DEBUG=INFO shows more"
    };
    format!("{what}: {words}{hint}")
}

/// What NCCL is told: not to block, and nothing else.
fn config(version: c_int) -> sys::ncclConfig_t {
    sys::ncclConfig_t {
        size: size_of::<sys::ncclConfig_t>(),
        magic: MAGIC,
        version: version.min(DESCRIBED).cast_unsigned(),
        blocking: 0,
        cgaClusterSize: UNDEFINED,
        minCTAs: UNDEFINED,
        maxCTAs: UNDEFINED,
        netName: std::ptr::null(),
        splitShare: UNDEFINED,
        trafficClass: UNDEFINED,
        commName: std::ptr::null(),
        collnetEnable: UNDEFINED,
        CTAPolicy: UNDEFINED,
        shrinkShare: UNDEFINED,
        nvlsCTAs: UNDEFINED,
        nChannelsPerNetPeer: UNDEFINED,
        nvlinkCentricSched: UNDEFINED,
        graphUsageMode: UNDEFINED,
        numRmaCtx: UNDEFINED,
        maxP2pPeers: UNDEFINED,
    }
}
