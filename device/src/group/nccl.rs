//! Groups of GPUs: a non-blocking NCCL communicator, with a deadline for every wait.
//!
//! Invariants:
//! - A communicator is destroyed or aborted once, and not used afterwards. Its operations on the stream have ended
//!   then.
//! - The host is at most [`MAX_PENDING`] calls ahead of the stream, and waits for it with a deadline: a driver whose queue is
//!   full would wait without one.

use std::ffi::{CStr, c_int, c_uint, c_void};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cudarc::driver::result::{DriverError, event};
use cudarc::driver::sys as driver_sys;
use cudarc::nccl::{result as nccl, sys};

use super::waiting::GroupWait;
use super::{GroupBackend, GroupTimeout, MemoryRange, failed};
use crate::cuda::{Cuda, Library};
use crate::device::{Device, all_open};
use crate::error::{DeviceError, Result};
use crate::inventory::OLDEST_NCCL;

/// Magic number of an NCCL configuration.
const MAGIC: c_uint = 0xcafe_beef;
/// Default of an NCCL option.
const UNDEFINED: c_int = c_int::MIN;
/// NCCL version whose configuration struct cudarc declares.
const DESCRIBED: c_int = 23_000;
/// Largest number of calls that the stream has not completed.
const MAX_PENDING: usize = 4;
/// Pause between two polls; far shorter than a bucket takes.
const PAUSE: Duration = Duration::from_micros(50);
/// Deadline for leaving a group before it is aborted.
const LEAVING: Duration = Duration::from_secs(10);

/// A member of a group.
#[derive(Debug)]
pub(super) struct Communicator {
    device: Device,
    rank: usize,
    world: usize,
    timeout: GroupTimeout,
    /// Set by `abort`; ends every wait.
    leaving: AtomicBool,
    state: Mutex<CommunicatorState>,
}

#[derive(Debug)]
struct CommunicatorState {
    /// `None` after an abort.
    raw: Option<Raw>,
    /// Number of calls so far.
    calls: usize,
    /// Events after each of the last calls, by call number modulo [`MAX_PENDING`].
    done: [Option<StreamEvent>; MAX_PENDING],
}

#[derive(Clone, Copy, Debug)]
struct Raw(sys::ncclComm_t);

/// An event on the stream.
#[derive(Debug)]
struct StreamEvent(driver_sys::CUevent);

// SAFETY: an event may be used from any thread.
#[expect(unsafe_code, reason = "a pointer of the driver")]
unsafe impl Send for StreamEvent {}

impl Drop for StreamEvent {
    #[expect(unsafe_code, reason = "calls of the driver")]
    fn drop(&mut self) {
        // SAFETY: it is not used again; a pending event is destroyed when it completes.
        let _ = unsafe { event::destroy(self.0) };
    }
}

// SAFETY: a communicator may be used from any thread, one at a time, which the lock ensures.
#[expect(unsafe_code, reason = "a pointer of NCCL")]
unsafe impl Send for Raw {}

/// Status of an NCCL call.
enum CallStatus {
    Done,
    UnderWay,
    Failed(NcclFailure),
}

/// An error of an NCCL call.
struct NcclFailure {
    reason: String,
    /// Whether this member caused it, independent of the others.
    own: bool,
}

/// A new NCCL unique id, 128 bytes.
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
        rank: usize,
        world: usize,
        timeout: GroupTimeout,
    ) -> Result<Self> {
        let refused = |reason: String| failed(device, "join", Duration::ZERO, reason);
        check(device)?;
        let own = cuda(device)?;
        // Members of this process have opened their devices before they share an id.
        for other in all_open() {
            if let Some(other) = other.backend.as_any().downcast_ref::<Cuda>() {
                own.open_pool_to(other)?;
            }
        }
        // A device that was closed meanwhile leaves another context.
        own.bind()?;
        let internal: [u8; 128] =
            id.try_into().map_err(|_| refused(format!("an NCCL id has 128 bytes and not {}", id.len())))?;
        let id = sys::ncclUniqueId { internal: internal.map(|byte| byte.cast_signed()) };
        let version = version().map_err(&refused)?;
        let mut config = config(version);
        let mut raw = std::ptr::null_mut();
        let int = |number: usize| c_int::try_from(number).unwrap_or(c_int::MAX);
        // SAFETY: the configuration has NCCL's layout, and is read before the call returns.
        let answer =
            unsafe { sys::ncclCommInitRankConfig(&raw mut raw, int(world), id, int(rank), &raw mut config) };
        if raw.is_null() {
            return Err(refused(last(answer, None).reason));
        }
        let state = CommunicatorState { raw: Some(Raw(raw)), calls: 0, done: [const { None }; MAX_PENDING] };
        let communicator = Self {
            device: device.clone(),
            rank,
            world,
            timeout,
            leaving: AtomicBool::new(false),
            state: Mutex::new(state),
        };
        let state =
            communicator.settle(Raw(raw), answer, "join", &mut GroupWait::begin(&communicator.timeout));
        if state.is_err() {
            communicator.abort();
        }
        state.map(|()| communicator)
    }

    /// Runs calls as one NCCL group, and waits until NCCL has enqueued them.
    fn grouped(
        &self,
        operation: &'static str,
        calls: impl FnOnce(sys::ncclComm_t, sys::cudaStream_t) -> sys::ncclResult_t,
    ) -> Result<()> {
        let cuda = cuda(&self.device)?;
        cuda.bind()?;
        let mut state = self.state();
        let raw = self.communicator(&state, operation)?;
        let mut waiting = GroupWait::begin(&self.timeout);
        self.limit_pending(&state, raw, operation, &mut waiting)?;
        let fails = |error: nccl::NcclError| self.error(operation, Duration::ZERO, last(error.0, Some(raw)));
        nccl::group_start().map_err(fails)?;
        let called = calls(raw.0, cuda.stream().cast());
        // A group that was started has to be ended even after an error.
        let ended = match nccl::group_end() {
            Ok(nccl::NcclStatus::InProgress) => sys::ncclResult_t::ncclInProgress,
            Ok(_) => sys::ncclResult_t::ncclSuccess,
            Err(error) => error.0,
        };
        if let CallStatus::Failed(failure) = status_of(called, Some(raw)) {
            return Err(self.error(operation, Duration::ZERO, failure));
        }
        self.settle(raw, ended, operation, &mut waiting)?;
        self.mark(&mut state, cuda)
    }

    /// Waits until fewer than [`MAX_PENDING`] calls are pending on the stream.
    #[expect(unsafe_code, reason = "calls of the driver")]
    fn limit_pending(
        &self,
        state: &CommunicatorState,
        raw: Raw,
        operation: &'static str,
        waiting: &mut GroupWait<'_>,
    ) -> Result<()> {
        let Some(StreamEvent(oldest)) = &state.done[state.calls % MAX_PENDING] else { return Ok(()) };
        // SAFETY: the event is valid.
        let reached = || match unsafe { event::query(*oldest) } {
            Ok(()) => Ok(true),
            Err(DriverError(driver_sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(error) => Err(self.broken("cuEventQuery", error)),
        };
        self.until(raw, operation, waiting, reached)
    }

    /// Records an event after the last call.
    #[expect(unsafe_code, reason = "calls of the driver")]
    fn mark(&self, state: &mut CommunicatorState, cuda: &Cuda) -> Result<()> {
        let place = &mut state.done[state.calls % MAX_PENDING];
        state.calls += 1;
        let mark = match place.take() {
            Some(mark) => mark,
            None => StreamEvent(
                event::create(driver_sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
                    .map_err(|error| self.broken("cuEventCreate", error))?,
            ),
        };
        // SAFETY: event and stream are valid.
        unsafe { event::record(mark.0, cuda.stream()) }
            .map_err(|error| self.broken("cuEventRecord", error))?;
        *place = Some(mark);
        Ok(())
    }

    /// Waits until `reached`, polling the communicator for errors.
    fn until(
        &self,
        raw: Raw,
        operation: &'static str,
        waiting: &mut GroupWait<'_>,
        mut reached: impl FnMut() -> Result<bool>,
    ) -> Result<()> {
        loop {
            let there = reached()?;
            let over = match self.status(raw) {
                CallStatus::Done if there => return Ok(()),
                CallStatus::Failed(failure) => Some(failure),
                CallStatus::Done | CallStatus::UnderWay => self.over(waiting),
            };
            if let Some(failure) = over {
                return Err(self.error(operation, waiting.started.elapsed(), failure));
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// The reason to end a wait, if any.
    fn over(&self, waiting: &mut GroupWait<'_>) -> Option<NcclFailure> {
        let left = || "this rank leaves the group".to_owned();
        let leaving = self.leaving.load(Ordering::Relaxed).then(left);
        let reason = leaving.or_else(|| waiting.over(|| self.missing()))?;
        Some(NcclFailure { reason, own: false })
    }

    fn communicator(&self, state: &CommunicatorState, operation: &'static str) -> Result<Raw> {
        let gone = || self.failed(operation, Duration::ZERO, "it was aborted".to_owned());
        state.raw.ok_or_else(gone)
    }

    /// Waits until a call is no longer in progress.
    fn settle(
        &self,
        raw: Raw,
        first: sys::ncclResult_t,
        operation: &'static str,
        waiting: &mut GroupWait<'_>,
    ) -> Result<()> {
        let mut state = status_of(first, Some(raw));
        loop {
            let over = match state {
                CallStatus::Done => return Ok(()),
                CallStatus::Failed(failure) => Some(failure),
                CallStatus::UnderWay => self.over(waiting),
            };
            if let Some(failure) = over {
                return Err(self.error(operation, waiting.started.elapsed(), failure));
            }
            std::thread::sleep(PAUSE);
            state = self.status(raw);
        }
    }

    /// Asynchronous status of the communicator.
    #[expect(unsafe_code, reason = "calls of NCCL")]
    fn status(&self, raw: Raw) -> CallStatus {
        let mut state: c_int = 0;
        // SAFETY: the communicator is valid, and a result is an int.
        let asked = unsafe { sys::ncclCommGetAsyncError(raw.0, (&raw mut state).cast()) };
        match (status_of(asked, Some(raw)), state) {
            (CallStatus::Failed(failure), _) => CallStatus::Failed(failure),
            (_, 0) => CallStatus::Done,
            (_, state) if state == sys::ncclResult_t::ncclInProgress as c_int => CallStatus::UnderWay,
            (_, state) => {
                let own = OWN.iter().any(|own| *own as c_int == state);
                CallStatus::Failed(NcclFailure {
                    reason: said(&format!("NCCL's error {state}"), Some(raw)),
                    own,
                })
            }
        }
    }

    /// Whether the stream is idle.
    fn idle(&self) -> Result<bool> {
        cuda(&self.device)?.is_idle()
    }

    fn broken(&self, call: &'static str, error: DriverError) -> DeviceError {
        DeviceError::Call { device: self.device.name(), call, reason: format!("{error:?}") }
    }

    fn missing(&self) -> String {
        let Self { rank, world, .. } = self;
        format!(
            "not all {world} ranks responded (this is rank {rank}): check whether their processes are running"
        )
    }

    fn failed(&self, operation: &'static str, waited: Duration, reason: String) -> DeviceError {
        failed(&self.device, operation, waited, reason)
    }

    fn error(&self, operation: &'static str, waited: Duration, failure: NcclFailure) -> DeviceError {
        // A dead peer also causes CUDA errors; errors of this member persist.
        if failure.own || self.idle().is_err() {
            return DeviceError::Call { device: self.device.name(), call: operation, reason: failure.reason };
        }
        self.failed(operation, waited, failure.reason)
    }

    fn state(&self) -> MutexGuard<'_, CommunicatorState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl GroupBackend for Communicator {
    #[expect(unsafe_code, reason = "calls of NCCL")]
    fn broadcast(&self, root: usize, part: MemoryRange) -> Result<()> {
        let (pointer, root) = (part.address as *mut c_void, c_int::try_from(root).unwrap_or(c_int::MAX));
        // SAFETY: the range is in a live buffer and used in stream order.
        self.grouped("broadcast", |raw, stream| unsafe {
            sys::ncclBroadcast(pointer, pointer, part.bytes, BYTES, root, raw, stream)
        })
    }

    #[expect(unsafe_code, reason = "calls of NCCL")]
    fn all_gather(&self, own: MemoryRange, cuts: &[Range<usize>], all: MemoryRange) -> Result<()> {
        // SAFETY: the ranges are in live buffers and used in stream order.
        self.grouped("all_gather", |raw, stream| unsafe {
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
    fn reduce_scatter(&self, values: MemoryRange, cuts: &[Range<usize>], own: MemoryRange) -> Result<()> {
        let (floats, sum) = (sys::ncclDataType_t::ncclFloat32, sys::ncclRedOp_t::ncclSum);
        // SAFETY: the ranges are in live buffers and used in stream order.
        self.grouped("reduce_scatter", |raw, stream| unsafe {
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

    #[expect(unsafe_code, reason = "calls of NCCL")]
    fn all_to_all(
        &self,
        values: MemoryRange,
        sends: &[Range<usize>],
        received: MemoryRange,
        receives: &[Range<usize>],
    ) -> Result<()> {
        // SAFETY: the ranges are in live buffers and used in stream order.
        self.grouped("all_to_all", |raw, stream| unsafe {
            let send = |(peer, range): (usize, &Range<usize>)| {
                let part = values.slice(range);
                sys::ncclSend(pointer(part), part.bytes, BYTES, peer as c_int, raw, stream)
            };
            let receive = |(peer, range): (usize, &Range<usize>)| {
                let part = received.slice(range);
                sys::ncclRecv(pointer(part), part.bytes, BYTES, peer as c_int, raw, stream)
            };
            let some = |(_, range): &(usize, &Range<usize>)| !range.is_empty();
            let sends = sends.iter().enumerate().filter(some).map(send);
            first_failure(sends.chain(receives.iter().enumerate().filter(some).map(receive)))
        })
    }

    fn wait(&self, operation: &'static str) -> Result<()> {
        let state = self.state();
        let raw = self.communicator(&state, operation)?;
        self.until(raw, operation, &mut GroupWait::begin(&self.timeout), || self.idle())
    }

    #[expect(unsafe_code, reason = "calls of NCCL")]
    fn abort(&self) {
        self.leaving.store(true, Ordering::Relaxed);
        let Some(raw) = self.state().raw.take() else { return };
        if cuda(&self.device).is_ok_and(|cuda| cuda.bind().is_ok()) {
            // SAFETY: the communicator is valid, and no other thread has it.
            let _ = unsafe { sys::ncclCommAbort(raw.0) };
            // Its kernels end now; the memory that they write is reused soon.
            let started = Instant::now();
            while started.elapsed() < LEAVING && self.idle().is_ok_and(|idle| !idle) {
                std::thread::sleep(PAUSE);
            }
        }
    }
}

impl Communicator {
    /// Leaves the group: finalizes the communicator, or aborts it at the deadline.
    #[expect(unsafe_code, reason = "calls of NCCL")]
    fn leave(&self) {
        let Some(raw) = self.state().raw else { return };
        // Other members may still read what this one sent, so finalize waits for them.
        // SAFETY: the communicator is valid.
        let begun = unsafe { sys::ncclCommFinalize(raw.0) };
        let timeout = GroupTimeout::from(self.timeout.deadline.min(LEAVING));
        if self.settle(raw, begun, "leave", &mut GroupWait::begin(&timeout)).is_err() {
            return self.abort();
        }
        self.state().raw = None;
        // SAFETY: it was finalized, and no other thread has it.
        let _ = unsafe { sys::ncclCommDestroy(raw.0) };
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if cuda(&self.device).is_ok_and(|cuda| cuda.bind().is_err()) {
            return;
        }
        self.leave();
        // Destroyed before the device, which may be dropped with this value.
        self.state().done = [const { None }; MAX_PENDING];
    }
}

const BYTES: sys::ncclDataType_t = sys::ncclDataType_t::ncclUint8;

fn pointer(part: MemoryRange) -> *mut c_void {
    part.address as *mut c_void
}

/// Whether all ranges have one length and cover everything in order.
fn even(cuts: &[Range<usize>], all: usize) -> bool {
    let len = all / cuts.len().max(1);
    len > 0
        && len * cuts.len() == all
        && cuts.iter().enumerate().all(|(rank, cut)| *cut == (rank * len..(rank + 1) * len))
}

/// Makes all calls in order; returns the first error.
fn first_failure(calls: impl Iterator<Item = sys::ncclResult_t>) -> sys::ncclResult_t {
    use sys::ncclResult_t::{ncclInProgress, ncclSuccess};
    let results: Vec<_> = calls.collect();
    results.into_iter().find(|result| ![ncclInProgress, ncclSuccess].contains(result)).unwrap_or(ncclSuccess)
}

fn cuda(device: &Device) -> Result<&Cuda> {
    let cuda = device.inner.backend.as_any().downcast_ref::<Cuda>();
    cuda.ok_or_else(|| failed(device, "join", Duration::ZERO, "it is no GPU".to_owned()))
}

/// An error if NCCL is not available.
pub(super) fn check(device: &Device) -> Result<()> {
    let there = Library::Nccl.check().and_then(|()| version().map(drop));
    there.map_err(|reason| DeviceError::Unavailable { device: device.name(), reason })
}

/// NCCL version, such as 22809 for 2.28.9. The library must be loaded.
fn version() -> std::result::Result<c_int, String> {
    let version = nccl::get_nccl_version().map_err(|error| last(error.0, None).reason)?;
    if version < OLDEST_NCCL {
        return Err(format!("libnccl.so has version {version}; install {OLDEST_NCCL} (2.14) or later"));
    }
    Ok(version)
}

/// Errors that this member caused by a wrong call.
const OWN: [sys::ncclResult_t; 2] =
    [sys::ncclResult_t::ncclInvalidArgument, sys::ncclResult_t::ncclInvalidUsage];

fn status_of(result: sys::ncclResult_t, raw: Option<Raw>) -> CallStatus {
    match result {
        sys::ncclResult_t::ncclSuccess => CallStatus::Done,
        sys::ncclResult_t::ncclInProgress => CallStatus::UnderWay,
        result => CallStatus::Failed(last(result, raw)),
    }
}

/// The error of a result.
fn last(result: sys::ncclResult_t, raw: Option<Raw>) -> NcclFailure {
    NcclFailure { reason: said(&format!("{result:?}"), raw), own: OWN.contains(&result) }
}

/// `what` with NCCL's last message, and a remedy if one is known.
#[expect(unsafe_code, reason = "calls of NCCL")]
fn said(what: &str, raw: Option<Raw>) -> String {
    let raw = raw.map_or(std::ptr::null_mut(), |raw| raw.0);
    // SAFETY: a null communicator is allowed.
    let words = unsafe { sys::ncclGetLastError(raw) };
    let words = if words.is_null() {
        String::new()
    } else {
        // SAFETY: a null-terminated text of NCCL.
        unsafe { CStr::from_ptr(words) }.to_string_lossy().trim().to_owned()
    };
    let hint = if words.contains("Duplicate GPU") {
        "; every rank needs its own GPU: between processes on one GPU use weights.transport = \"cuda-ipc\""
    } else {
        "; NCCL_DEBUG=INFO shows more"
    };
    format!("{what}: {words}{hint}")
}

/// Configuration of a communicator: non-blocking, all else default.
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
