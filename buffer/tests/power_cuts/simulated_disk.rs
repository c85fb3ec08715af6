//! A disk that loses its power, runs full or forgets writes.
//!
//! Invariant: it is no safer than a real disk. Synced bytes stay. After a power cut, each sector written since the last
//! sync contains its bytes at the sync or after any one of the writes, independently of the other sectors. Only changes
//! of the file's length stay in order, as in the journal of a file system. Sectors without a write are never damaged;
//! tests of damage change an image.

use std::collections::BTreeSet;
use std::fmt;
use std::io::{Error, ErrorKind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redb::StorageBackend;

/// What a disk writes as a whole, bytes.
pub(crate) const SECTOR: usize = 512;
/// How long a sync that does not end may take, far more than any test needs.
const PATIENCE: Duration = Duration::from_secs(60);

/// A file on the disk. Clones are the same file.
#[derive(Clone)]
pub(crate) struct SimulatedDisk(Arc<(Mutex<DiskState>, Condvar)>);

/// When a disk is full.
#[derive(Clone, Copy, Debug)]
pub(crate) enum DiskLimit {
    /// The file may not be longer, bytes: a quota.
    Length(usize),
    /// So many bytes may be written at new places, though the file may be any length: a file with holes.
    Written(usize),
}

struct DiskState {
    /// What a reader sees.
    live: Vec<u8>,
    /// What was there at the last sync.
    durable: Vec<u8>,
    /// What happened since, in order.
    pending: Vec<DiskChange>,
    /// Sectors that hold something.
    written: BTreeSet<usize>,
    limit: Option<DiskLimit>,
    /// Writes, changes of the length and syncs so far.
    operations: u64,
    /// The operation at which the power fails.
    cut_at: Option<u64>,
    /// Syncs do not end.
    slow: bool,
    /// A thread waits for a sync.
    syncing: bool,
}

#[derive(Clone)]
enum DiskChange {
    /// Whole sectors as the writer left them, and where they begin.
    Sectors(usize, Vec<u8>),
    Length(usize),
}

impl SimulatedDisk {
    /// A disk with a file that holds `image`, safely.
    pub(crate) fn holding(image: Vec<u8>) -> Self {
        let written = image.chunks(SECTOR).enumerate();
        let written =
            written.filter(|(_, sector)| sector.iter().any(|byte| *byte != 0)).map(|(n, _)| n).collect();
        let state = DiskState {
            durable: image.clone(),
            live: image,
            pending: Vec::new(),
            written,
            limit: None,
            operations: 0,
            cut_at: None,
            slow: false,
            syncing: false,
        };
        Self(Arc::new((Mutex::new(state), Condvar::new())))
    }

    pub(crate) fn empty() -> Self {
        Self::holding(Vec::new())
    }

    /// Cuts the power in the middle of the operation number `operation`, counted from 0: that one and all after it fail.
    pub(crate) fn cut_power_at(self, operation: u64) -> Self {
        self.state().cut_at = Some(operation);
        self
    }

    pub(crate) fn limit(&self, limit: Option<DiskLimit>) {
        self.state().limit = limit;
    }

    /// Lets `meanwhile` happen while the sync that it finds or that comes next does not end.
    pub(crate) fn during_a_sync<T>(&self, before: impl FnOnce(), meanwhile: impl FnOnce() -> T) -> T {
        self.state().slow = true;
        before();
        drop(self.wait_while(self.state(), |state| !state.syncing));
        let result = meanwhile();
        self.state().slow = false;
        self.0.1.notify_all();
        result
    }

    /// Writes, changes of the length and syncs so far.
    pub(crate) fn operations(&self) -> u64 {
        self.state().operations
    }

    /// Bytes in sectors that hold something.
    pub(crate) fn bytes_written(&self) -> usize {
        self.state().written.len() * SECTOR
    }

    /// What a reader sees now.
    pub(crate) fn image(&self) -> Vec<u8> {
        self.state().live.clone()
    }

    /// What is on the disk when the power is back; everything that is left to chance is drawn from `dice`.
    pub(crate) fn image_after_power_cut(&self, dice: &mut TestRng) -> Vec<u8> {
        let state = self.state();
        let lengths = state.pending.iter().filter(|change| matches!(change, DiskChange::Length(_))).count();
        let mut lengths_kept = dice.below(lengths + 1);
        let mut image = state.durable.clone();
        let mut sectors: Vec<(usize, &[u8])> = Vec::new();
        for change in &state.pending {
            match change {
                DiskChange::Sectors(at, bytes) => {
                    sectors.extend((*at..).step_by(SECTOR).zip(bytes.chunks(SECTOR)).collect::<Vec<_>>());
                }
                DiskChange::Length(_) if lengths_kept == 0 => {}
                DiskChange::Length(length) => {
                    lengths_kept -= 1;
                    image.resize(*length, 0);
                    // What was written behind the new end went with it.
                    sectors.retain(|(at, _)| at < length);
                }
            }
        }
        Fate::draw(dice).decide(&mut sectors, dice);
        for (at, bytes) in sectors {
            let end = image.len().min(at + bytes.len());
            if at < end {
                image[at..end].copy_from_slice(&bytes[..end - at]);
            }
        }
        image
    }

    /// The disk in a consistent state even after a panic: every change is a whole one.
    fn state(&self) -> MutexGuard<'_, DiskState> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_while<'a>(
        &self,
        state: MutexGuard<'a, DiskState>,
        condition: impl Fn(&mut DiskState) -> bool,
    ) -> MutexGuard<'a, DiskState> {
        let (state, waited) =
            self.0.1.wait_timeout_while(state, PATIENCE, condition).unwrap_or_else(PoisonError::into_inner);
        assert!(!waited.timed_out(), "nothing happened on the disk for {PATIENCE:?}");
        state
    }
}

/// How the writes of one power cut fare. Independent coins for all would almost never keep a whole commit, or none.
struct Fate {
    /// Sectors lost, of 16.
    lost: usize,
    in_order: bool,
    /// A sector shares the fate of so many that follow it: 1 tears writes anywhere, more keeps most of them whole.
    run: usize,
}

impl Fate {
    fn draw(dice: &mut TestRng) -> Self {
        let lost = [0, 1, 4, 8, 12, 15, 16][dice.below(7)];
        Self { lost, in_order: dice.below(2) == 0, run: [1, 8, 64][dice.below(3)] }
    }

    fn decide(&self, sectors: &mut Vec<(usize, &[u8])>, dice: &mut TestRng) {
        let mut left = 0;
        let mut lost = false;
        sectors.retain(|_| {
            if left == 0 {
                left = 1 + dice.below(2 * self.run - 1);
                lost = dice.below(16) < self.lost;
            }
            left -= 1;
            !lost
        });
        if !self.in_order {
            for n in (1..sectors.len()).rev() {
                sectors.swap(n, dice.below(n + 1));
            }
        }
    }
}

impl DiskState {
    /// Counts an operation; an error if the power fails in it or has failed before.
    fn power(&mut self) -> Result<(), Error> {
        let operation = self.operations;
        self.operations += 1;
        if self.cut_at.is_some_and(|cut| operation >= cut) { Err(no_power()) } else { Ok(()) }
    }

    fn has_power(&self) -> bool {
        self.cut_at.is_none_or(|cut| self.operations <= cut)
    }

    /// An error if a file of `length` bytes with `range` written does not fit on the disk.
    fn check_space(&self, length: usize, range: std::ops::Range<usize>) -> Result<(), Error> {
        let full = match self.limit {
            None => false,
            Some(DiskLimit::Length(most)) => length > self.live.len() && length > most,
            Some(DiskLimit::Written(most)) => {
                let sectors = range.start / SECTOR..range.end.div_ceil(SECTOR);
                let new = sectors.filter(|sector| !self.written.contains(sector)).count();
                new > 0 && (self.written.len() + new) * SECTOR > most
            }
        };
        if full {
            Err(Error::new(ErrorKind::StorageFull, "no space left on the simulated disk"))
        } else {
            Ok(())
        }
    }

    fn resize(&mut self, length: usize) {
        self.live.resize(length, 0);
        self.written.split_off(&length.div_ceil(SECTOR));
        self.pending.push(DiskChange::Length(length));
    }
}

impl StorageBackend for SimulatedDisk {
    fn len(&self) -> Result<u64, Error> {
        let state = self.state();
        if state.has_power() { Ok(state.live.len() as u64) } else { Err(no_power()) }
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Error> {
        let state = self.state();
        if !state.has_power() {
            return Err(no_power());
        }
        let at = position(offset)?;
        let bytes = state.live.get(at..at.saturating_add(out.len())).ok_or(ErrorKind::UnexpectedEof)?;
        out.copy_from_slice(bytes);
        Ok(())
    }

    fn set_len(&self, length: u64) -> Result<(), Error> {
        let mut state = self.state();
        let had_power = state.has_power();
        let power = state.power();
        let length = position(length)?;
        if had_power {
            state.check_space(length, 0..0)?;
            state.resize(length);
        }
        power
    }

    fn sync_data(&self) -> Result<(), Error> {
        let mut state = self.state();
        state.power()?;
        if state.slow {
            state.syncing = true;
            self.0.1.notify_all();
            state = self.wait_while(state, |state| state.slow);
            state.syncing = false;
        }
        let DiskState { durable, pending, .. } = &mut *state;
        for change in pending.drain(..) {
            match change {
                DiskChange::Length(length) => durable.resize(length, 0),
                DiskChange::Sectors(at, bytes) => {
                    let end = durable.len().min(at + bytes.len());
                    if at < end {
                        durable[at..end].copy_from_slice(&bytes[..end - at]);
                    }
                }
            }
        }
        debug_assert!(state.durable == state.live, "a sync makes durable what a reader sees");
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), Error> {
        let mut state = self.state();
        let had_power = state.has_power();
        let power = state.power();
        if had_power {
            let at = position(offset)?;
            let end = at.checked_add(data.len()).ok_or(ErrorKind::FileTooLarge)?;
            state.check_space(end, at..end)?;
            if end > state.live.len() {
                state.resize(end);
            }
            state.live[at..end].copy_from_slice(data);
            state.written.extend(at / SECTOR..end.div_ceil(SECTOR));
            let first = at / SECTOR * SECTOR;
            let last = state.live.len().min(end.next_multiple_of(SECTOR));
            let sectors = state.live[first..last].to_vec();
            state.pending.push(DiskChange::Sectors(first, sectors));
        }
        power
    }
}

impl fmt::Debug for SimulatedDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state();
        f.debug_struct("SimulatedDisk")
            .field("length", &state.live.len())
            .field("pending", &state.pending.len())
            .field("operations", &state.operations)
            .finish_non_exhaustive()
    }
}

/// Numbers that look random and are the same for the same seed (splitmix64).
#[derive(Clone, Debug)]
pub(crate) struct TestRng(pub(crate) u64);

impl TestRng {
    /// A number below `end`, which is above 0.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        usize::try_from(mixed % end as u64).expect("less than `end`, which is one")
    }
}

fn no_power() -> Error {
    Error::other("the simulated disk has no power")
}

fn position(offset: u64) -> Result<usize, Error> {
    usize::try_from(offset).map_err(|_| ErrorKind::FileTooLarge.into())
}

#[test]
fn an_unsynced_write_is_kept_lost_or_torn_and_a_synced_one_is_there() {
    let mut seen = BTreeSet::new();
    for seed in 0..2000 {
        let disk = SimulatedDisk::empty();
        disk.set_len(4 * SECTOR as u64).unwrap();
        disk.write(0, &[1; 2 * SECTOR]).unwrap();
        disk.sync_data().unwrap();
        disk.write(SECTOR as u64, &[2; 2 * SECTOR]).unwrap();
        disk.write(2 * SECTOR as u64, &[3; SECTOR]).unwrap();
        disk.set_len(3 * SECTOR as u64).unwrap();
        let image = disk.image_after_power_cut(&mut TestRng(seed));
        assert!(
            image.chunks(SECTOR).all(|sector| sector.iter().all(|byte| *byte == sector[0])),
            "half a sector"
        );
        assert_eq!(image[0], 1, "seed {seed} lost what was synced");
        seen.insert((image[SECTOR], image[2 * SECTOR], image.len() / SECTOR));
    }
    let all =
        [1, 2].iter().flat_map(|a| [0, 2, 3].iter().flat_map(move |b| [3, 4].map(|length| (*a, *b, length))));
    assert_eq!(seen, all.collect(), "(second sector, third sector, sectors)");
}

#[test]
fn calls_fail_after_a_power_cut_and_the_last_write_may_remain() {
    let disk = SimulatedDisk::holding(vec![0; SECTOR]).cut_power_at(1);
    disk.write(0, &[1]).unwrap();
    assert!(disk.write(0, &[2]).is_err());
    assert!(disk.write(0, &[3]).is_err() && disk.read(0, &mut [0]).is_err() && disk.sync_data().is_err());
    let left: BTreeSet<u8> = (0..99).map(|seed| disk.image_after_power_cut(&mut TestRng(seed))[0]).collect();
    assert_eq!(left, [0, 1, 2].into());
}

#[test]
fn a_full_disk_refuses_writes_and_keeps_its_content() {
    let disk = SimulatedDisk::holding(vec![1; SECTOR]);
    disk.limit(Some(DiskLimit::Written(2 * SECTOR)));
    disk.set_len(9 * SECTOR as u64).unwrap();
    disk.write(SECTOR as u64, &[2]).unwrap();
    assert_eq!(disk.write(2 * SECTOR as u64, &[3]).unwrap_err().kind(), ErrorKind::StorageFull);
    disk.write(0, &[4]).unwrap();
    disk.limit(Some(DiskLimit::Length(10 * SECTOR)));
    assert_eq!(disk.set_len(11 * SECTOR as u64).unwrap_err().kind(), ErrorKind::StorageFull);
    disk.limit(None);
    disk.write(2 * SECTOR as u64, &[3]).unwrap();
    assert_eq!((disk.image()[0], disk.image()[SECTOR], disk.image()[2 * SECTOR]), (4, 2, 3));
}
