//! Receives the weights of a version: from shared memory, as deltas, or in full.
//!
//! Invariant: returned weights have the announced digest, or lie in the publisher's slot. Damaged weights are dropped
//! together with their base. From a relay exactly the announced version is accepted; the hub may send a newer one.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use trajectory::PolicyVersion;

use super::client::FetchError;
use super::upstream::FrameSource;
use super::wire::VersionNotice;
use crate::copier::copy_rounded;
use crate::delta::{DeltaFrame, apply, check_payload, full_bytes, longest_payload, value_of};
use crate::direct::WeightsLocation;
use crate::frame::{FrameHeader, FrameKind, HEADER};
use crate::hub::AssignedRelay;
use crate::shm::{SlotReader, is_of_publisher};
use crate::{Digest, Dtype, Hub, Received, Snapshot};

/// Weights in another precision per read.
const CHUNK: usize = 1 << 18;
/// Maximum number of weights of a model; an announcement beyond is damaged.
const MAX_WEIGHTS: u64 = 1 << 40;

/// The last received weights, and memory for the next.
#[derive(Debug)]
pub(super) struct WeightReceiver {
    threads: usize,
    /// Directory of the publishers of this host.
    shared: PathBuf,
    reader: SlotReader,
    /// The newest version received over the network: the base of the next delta.
    current: Option<DeltaBase>,
    /// Memory of an earlier version, which the sampler may still reference.
    spare: Option<Arc<[f32]>>,
    /// The hub that passes received versions on, if this is a relay.
    relay: Option<Hub>,
}

#[derive(Clone, Debug)]
struct DeltaBase {
    version: PolicyVersion,
    digest: Digest,
    dtype: Dtype,
    values: Arc<[f32]>,
}

/// A valid announcement.
#[derive(Clone, Debug)]
pub(super) struct AnnouncedVersion {
    version: PolicyVersion,
    digest: Option<Digest>,
    len: usize,
    dtype: Dtype,
    shm: Option<String>,
    /// How to get it, if it is on a device.
    direct: Option<WeightsLocation>,
    /// The relay to fetch it from.
    relay: Option<AssignedRelay>,
}

impl AnnouncedVersion {
    pub(super) fn read(news: VersionNotice) -> Result<Self, String> {
        let dtype = Dtype::ALL.into_iter().find(|dtype| dtype.as_str() == news.dtype);
        if news.parameters > MAX_WEIGHTS {
            return Err(format!("{} weights are announced", news.parameters));
        }
        Ok(Self {
            version: PolicyVersion(news.version),
            digest: news.digest.map(|digest| digest.parse()).transpose()?,
            len: news.parameters as usize,
            dtype: dtype.ok_or_else(|| format!("weights are announced as {:?}", news.dtype))?,
            shm: news.shm,
            direct: news.direct,
            relay: news.relay.map(AssignedRelay::from),
        })
    }

    pub(super) fn version(&self) -> PolicyVersion {
        self.version
    }

    /// Number of weights.
    pub(super) fn parameters(&self) -> usize {
        self.len
    }

    pub(super) fn direct(&self) -> Option<&WeightsLocation> {
        self.direct.as_ref()
    }

    pub(super) fn relay(&self) -> Option<&AssignedRelay> {
        self.relay.as_ref()
    }

    /// The digest for an error; zeros if it is unknown.
    pub(super) fn digest(&self) -> Digest {
        self.digest.unwrap_or_else(|| Digest::from_bytes([0; 32]))
    }
}

impl WeightReceiver {
    /// `relay` passes received versions on.
    pub(super) fn new(threads: usize, shared: PathBuf, relay: Option<Hub>) -> Self {
        Self { threads, shared, reader: SlotReader::default(), current: None, spare: None, relay }
    }

    /// The weights in the publisher's slot; `None` if the slot was overwritten, an error if the slot will never be
    /// readable.
    pub(super) fn shared(&mut self, wanted: &AnnouncedVersion) -> Result<Option<Snapshot>, String> {
        let Some(path) = &wanted.shm else { return Err("the publisher has no shared memory".to_owned()) };
        if !is_of_publisher(Path::new(path), &self.shared) {
            let shared = self.shared.display();
            return Err(format!("the server names {path:?}, which is no file of a publisher in {shared}"));
        }
        let started = Instant::now();
        let pinned = self.reader.pin(Path::new(path), wanted.version).map_err(|error| error.to_string())?;
        let Some(pinned) = pinned else { return Ok(None) };
        if (pinned.values.len(), pinned.dtype) != (wanted.len, wanted.dtype) {
            return Err(format!("{path} does not have the weights that were announced"));
        }
        if let (Some(found), Some(announced)) = (pinned.digest, wanted.digest)
            && found != announced
        {
            return Err(format!("{path} has weights {found}, and {announced} were announced"));
        }
        // The receipt proves them, as within a process; a digest stored beside them would only be copied.
        let received = Received { bytes: 0, took: started.elapsed() };
        Ok(Some(Snapshot::received(wanted.version, pinned.values, received, None)))
    }

    /// Fetches the weights over the network.
    pub(super) fn fetch(
        &mut self,
        source: FrameSource<'_>,
        wanted: &AnnouncedVersion,
    ) -> Result<Snapshot, FetchError> {
        let Some(digest) = wanted.digest else { return Err(FetchError::VersionGone) };
        let started = Instant::now();
        let near = |current: &DeltaBase| {
            current.version <= wanted.version
                && current.dtype == wanted.dtype
                && current.values.len() == wanted.len
        };
        let current = self.current.take().filter(near);
        let changes = match current.as_ref().map(|current| changes(source, current, wanted)) {
            Some(Ok(changes)) => Some(changes),
            Some(Err(FetchError::VersionGone)) | None => None,
            Some(Err(error)) => {
                // The base is unchanged, so a later call can continue from it. One that the hub has damaged changes for is
                // dropped: the next push is full.
                let keeps = source.is_relay() || matches!(error, FetchError::Unreachable(_));
                self.current = current.filter(|_| keeps);
                return Err(error);
            }
        };
        let (current, bytes, frames) = match (current, changes) {
            (Some(current), Some(changes)) => {
                let bytes: u64 = changes.iter().map(|delta| delta.frame.len() as u64).sum();
                (self.follow(current, &changes)?, bytes, changes)
            }
            (current, _) => {
                let bytes = full_bytes(wanted.len, wanted.dtype);
                (self.full(source, wanted, digest, current)?, bytes, Vec::new())
            }
        };
        if current.version == wanted.version && current.digest != digest {
            let reason = format!("the announced digest is {digest}, that of what came is {}", current.digest);
            return Err(FetchError::Corrupt(reason));
        }
        let received = Received { bytes, took: started.elapsed() };
        let values = Arc::clone(&current.values).into();
        let snapshot = Snapshot::received(current.version, values, received, Some(current.digest));
        self.current = Some(current);
        if let Some(relay) = self.relay.as_ref().filter(|relay| relay.dtype() == wanted.dtype) {
            let frames = frames.into_iter().map(ReceivedDelta::into_frame).collect();
            // A hub of received versions fails only after a panic, which ends its requests.
            let _ = relay.relay(&Arc::new(snapshot.clone()), frames);
        }
        Ok(snapshot)
    }

    /// Applies deltas, in place if the base is not referenced any more.
    fn follow(&mut self, current: DeltaBase, changes: &[ReceivedDelta]) -> Result<DeltaBase, FetchError> {
        let Some(ReceivedDelta { header: last, .. }) = changes.last() else { return Ok(current) };
        let mut values = current.values;
        if Arc::get_mut(&mut values).is_none() {
            let mut own = self.memory(values.len());
            copy_rounded(&values, own_mut(&mut own)?, Dtype::F32, self.threads);
            self.spare = Some(std::mem::replace(&mut values, own));
        }
        for ReceivedDelta { header, frame, .. } in changes {
            let values = own_mut(&mut values)?;
            apply(header, &frame[HEADER..], values, self.threads).map_err(FetchError::Corrupt)?;
        }
        let found = Digest::on(&values, self.threads);
        if found != last.digest {
            let reason = format!("the changes lead to {}, and what came of them is {found}", last.digest);
            return Err(FetchError::Corrupt(reason));
        }
        Ok(DeltaBase { version: last.version, digest: found, dtype: current.dtype, values })
    }

    /// `[len]` weights of unreferenced memory.
    fn memory(&mut self, len: usize) -> Arc<[f32]> {
        let free = |spare: &mut Arc<[f32]>| spare.len() == len && Arc::get_mut(spare).is_some();
        match self.spare.take_if(free) {
            Some(spare) => spare,
            None => std::iter::repeat_n(0.0, len).collect(),
        }
    }

    /// All weights, into the memory of `current`, which is kept if the source has none.
    fn full(
        &mut self,
        source: FrameSource<'_>,
        wanted: &AnnouncedVersion,
        digest: Digest,
        current: Option<DeltaBase>,
    ) -> Result<DeltaBase, FetchError> {
        let (version, dtype) = (wanted.version, wanted.dtype);
        let expected = FrameHeader::full(version, digest, wanted.len, dtype);
        let opened = source.full(version, full_bytes(wanted.len, dtype)).and_then(|mut stream| {
            let (header, _) = receive_header(&mut stream)?;
            let other = || FetchError::Corrupt(format!("{header:?} came instead of {expected:?}"));
            if header == expected { Ok(stream) } else { Err(other()) }
        });
        let mut stream = match opened {
            Ok(stream) => stream,
            Err(error) => {
                self.current = current;
                return Err(error);
            }
        };
        self.spare = current.map(|current| current.values).or(self.spare.take());
        let mut values = self.memory(wanted.len);
        let received = receive_values(&mut stream, own_mut(&mut values)?, dtype).and_then(|()| {
            let found = Digest::on(&values, self.threads);
            let damaged = || FetchError::Corrupt(format!("the digest of what came is {found}"));
            if found == digest { Ok(()) } else { Err(damaged()) }
        });
        if let Err(trouble) = received {
            self.spare = Some(values);
            return Err(trouble);
        }
        Ok(DeltaBase { version, digest, dtype, values })
    }
}

/// Mutable access to unreferenced memory.
fn own_mut(values: &mut Arc<[f32]>) -> Result<&mut [f32], FetchError> {
    Arc::get_mut(values).ok_or_else(|| FetchError::Corrupt("the memory to receive into is in use".to_owned()))
}

/// A delta as it was received.
struct ReceivedDelta {
    base: PolicyVersion,
    header: FrameHeader,
    /// Header and payload.
    frame: Vec<u8>,
}

impl ReceivedDelta {
    fn into_frame(self) -> DeltaFrame {
        DeltaFrame::received(self.base, self.frame)
    }
}

/// The deltas from `current` to a version at least as new as `wanted`. [`FetchError::VersionGone`] unless they are together smaller
/// than the weights.
fn changes(
    source: FrameSource<'_>,
    current: &DeltaBase,
    wanted: &AnnouncedVersion,
) -> Result<Vec<ReceivedDelta>, FetchError> {
    let (mut base, mut digest, mut changes) = (current.version, current.digest, Vec::new());
    let mut left = full_bytes(current.values.len(), current.dtype);
    while base < wanted.version {
        let delta = receive_delta(source, current, base, digest, left)?;
        left -= delta.frame.len() as u64;
        (base, digest) = (delta.header.version, delta.header.digest);
        changes.push(delta);
    }
    // A relay does not decide what a version is.
    if source.is_relay() && (base, Some(digest)) != (wanted.version, wanted.digest) {
        return Err(FetchError::Corrupt(format!(
            "its changes lead to {base} ({digest}), and {} ({}) was announced",
            wanted.version,
            wanted.digest()
        )));
    }
    Ok(changes)
}

/// A header, decoded and as it came.
fn receive_header(stream: &mut impl Read) -> Result<(FrameHeader, [u8; HEADER]), FetchError> {
    let mut header = [0; HEADER];
    stream.read_exact(&mut header).map_err(lost)?;
    Ok((FrameHeader::decode(&header).map_err(FetchError::Corrupt)?, header))
}

/// The delta from `base`, whose weights have the digest `of`. Its frame has less than `most` bytes.
fn receive_delta(
    source: FrameSource<'_>,
    current: &DeltaBase,
    base: PolicyVersion,
    of: Digest,
    most: u64,
) -> Result<ReceivedDelta, FetchError> {
    let (len, longest) = (current.values.len(), longest_payload(current.values.len()));
    let mut stream = source.delta(base, HEADER as u64 + longest)?;
    let (header, head) = receive_header(&mut stream)?;
    let fits = matches!(header.kind, FrameKind::Delta { base: b, of: o, .. } if (b, o) == (base, of));
    if !fits || header.version <= base || (header.values, header.dtype) != (len as u64, current.dtype) {
        return Err(FetchError::Corrupt(format!(
            "{header:?} does not continue {base} ({of}, {len} weights)"
        )));
    }
    if header.payload > longest {
        return Err(FetchError::Corrupt(format!(
            "{} bytes of changes are more than there can be",
            header.payload
        )));
    }
    if HEADER as u64 + header.payload >= most {
        return Err(FetchError::VersionGone);
    }
    let mut frame = vec![0; HEADER + header.payload as usize];
    frame[..HEADER].copy_from_slice(&head);
    stream.read_exact(&mut frame[HEADER..]).map_err(lost)?;
    // Before the base is changed: then only the bytes of the relay are lost.
    if source.is_relay() {
        check_payload(&header, &frame[HEADER..]).map_err(FetchError::Corrupt)?;
    }
    Ok(ReceivedDelta { base, header, frame })
}

/// Reads all weights directly to their destination.
fn receive_values(stream: &mut impl Read, values: &mut [f32], dtype: Dtype) -> Result<(), FetchError> {
    if dtype == Dtype::F32 && cfg!(target_endian = "little") {
        return stream.read_exact(bytemuck::cast_slice_mut(values)).map_err(lost);
    }
    let mut words = vec![0; CHUNK * dtype.bytes()];
    for part in values.chunks_mut(CHUNK) {
        let words = &mut words[..part.len() * dtype.bytes()];
        stream.read_exact(words).map_err(lost)?;
        let words = words.chunks_exact(dtype.bytes());
        part.iter_mut().zip(words).for_each(|(value, word)| *value = value_of(word));
    }
    Ok(())
}

/// A read timed out, or the connection was closed.
#[expect(clippy::needless_pass_by_value, reason = "it is made for `map_err`")]
fn lost(error: std::io::Error) -> FetchError {
    FetchError::Unreachable(error.to_string())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use axum::Router;
    use connect::ServerAddress;

    use super::*;
    use crate::http::client::HubClient;
    use crate::http::tests::TestHub;

    #[test]
    fn deltas_that_are_together_longer_than_the_weights_are_not_kept() {
        let (values, digest) = (vec![0.0_f32; 1000], Digest::of(&[1.0]));
        let asked = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&asked);
        let answer = move || {
            let base = count.fetch_add(1, Ordering::Relaxed);
            let kind = FrameKind::Delta { base: PolicyVersion(base), of: digest, checksum: [0; 32] };
            let full = FrameHeader::full(PolicyVersion(base + 1), digest, 1000, Dtype::F32);
            let header = FrameHeader { kind, payload: 1500, ..full }.encode();
            async move { [&header[..], &[0; 1500]].concat() }
        };
        let served = TestHub::start(Router::new().fallback(answer));
        let url = format!("http://{}", served.address);
        let server = ServerAddress { url: &url, token: None, roots: None };
        let client = HubClient::new(server, "worker").unwrap();
        let current =
            DeltaBase { version: PolicyVersion(0), digest, dtype: Dtype::F32, values: values.into() };
        let wanted = AnnouncedVersion {
            version: PolicyVersion(1 << 40),
            digest: Some(digest),
            len: 1000,
            dtype: Dtype::F32,
            shm: None,
            direct: None,
            relay: None,
        };
        let found = changes(FrameSource::hub(&client), &current, &wanted);
        assert!(matches!(found, Err(FetchError::VersionGone)));
        assert_eq!(asked.load(Ordering::Relaxed), 3, "of weights of 4184 bytes");
    }
}
