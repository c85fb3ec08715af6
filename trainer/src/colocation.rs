//! A trainer that shares a device with a sampler in turns, and its memory while the sampler computes.
//!
//! During the turn of the sampler, the gradients are freed, because every step starts them at zero. The optimizer state and
//! then the weights (with an adapter also the frozen ones under it), of the policy and then of a separate critic, stay in
//! memory as far as the budget allows. The rest is written to one file per network and read back before the next step. The
//! files have no name, so the system removes them however the process ends. Device memory is freed in the same way. The
//! device copy of a frozen network is always freed.
//!
//! Invariant: values that are read back have the bits that were written, and no step runs in between, so the final weights do
//! not depend on the memory budget.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use model::{DeviceTurn, MemoryBudget};

use crate::TrainerError;
use crate::learner::Learner;
use crate::optimizer::StateStream;

/// Size of the buffer between tensors and file, bytes.
const GATHERED: usize = 1 << 20;

/// The trainer's place at a device that it shares with a sampler.
#[derive(Debug)]
pub struct Colocation {
    turn: DeviceTurn,
    directory: PathBuf,
    /// Residency of the policy, then of the critic.
    places: Vec<NetworkResidency>,
    resting: bool,
    freed_bytes: u64,
}

/// Where the state of one network is during the turn of the sampler.
#[derive(Debug, Default)]
struct NetworkResidency {
    optimizer_stays: bool,
    weights_stay: bool,
    file: Option<File>,
    /// Number of values of every stream in the file.
    lengths: Vec<usize>,
}

impl Colocation {
    /// A colocation of `networks`. Idle state stays in memory within `budget`; the rest goes to files in `directory`.
    pub(crate) fn new(
        turn: DeviceTurn,
        directory: &Path,
        budget: &MemoryBudget,
        networks: Vec<&mut Learner>,
    ) -> Self {
        let place = |network: &mut Learner| {
            let [optimizer, weights] = network.bytes_to_keep();
            NetworkResidency {
                optimizer_stays: budget.claim(optimizer),
                weights_stay: budget.claim(weights),
                ..NetworkResidency::default()
            }
        };
        let places = networks.into_iter().map(place).collect();
        Self { turn, directory: directory.to_owned(), places, resting: false, freed_bytes: 0 }
    }

    /// Whether the state of the networks has left memory.
    pub(crate) fn is_resting(&self) -> bool {
        self.resting
    }

    /// Bytes that the last [`Self::rest`] freed.
    pub(crate) fn freed_bytes(&self) -> u64 {
        self.freed_bytes
    }

    /// Frees the memory of `networks` and passes the device to the sampler.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub(crate) fn rest(&mut self, networks: Vec<&mut Learner>) -> Result<(), TrainerError> {
        self.resting = true;
        self.freed_bytes = 0;
        for (network, place) in networks.into_iter().zip(&mut self.places) {
            self.freed_bytes += network.drop_gradients();
            self.freed_bytes += place.leave_device(network)?;
            let moved = place.store(network, &self.directory);
            self.freed_bytes += moved.map_err(|source| scratch(&self.directory, source))?;
        }
        self.turn.pass();
        Ok(())
    }

    /// Returns the memory that a step has freed to the system, before more is allocated.
    pub(crate) fn release(&self) {
        self.turn.release();
    }

    /// Waits for the device, and restores the state of `networks`. Returns false if `stop` was set before.
    ///
    /// # Errors
    /// If the sampler does not pass the device within `wait`, or a file cannot be read.
    pub(crate) fn take(
        &mut self,
        networks: Vec<&mut Learner>,
        wait: Duration,
        stop: &AtomicBool,
    ) -> Result<bool, TrainerError> {
        if !self.turn.take(wait, stop)? {
            return Ok(false);
        }
        self.wake(networks)?;
        Ok(true)
    }

    /// Restores the state of `networks`.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub(crate) fn wake(&mut self, networks: Vec<&mut Learner>) -> Result<(), TrainerError> {
        if !std::mem::take(&mut self.resting) {
            return Ok(());
        }
        for (network, place) in networks.into_iter().zip(&mut self.places) {
            place.restore(network).map_err(|source| scratch(&self.directory, source))?;
            network.enter_device()?;
        }
        Ok(())
    }
}

impl NetworkResidency {
    /// Moves the state that does not stay from the device to the host. Returns the bytes.
    fn leave_device(&self, network: &mut Learner) -> Result<u64, TrainerError> {
        network.leave_device(!self.optimizer_stays, !self.weights_stay)
    }

    /// The state of `network` that does not stay.
    fn leaving<'a>(&self, network: &'a mut Learner) -> Vec<StateStream<'a>> {
        match (self.optimizer_stays, self.weights_stay) {
            (true, true) => Vec::new(),
            (false, true) => network.optimizer_streams(),
            (true, false) => network.weight_streams(),
            (false, false) => network.all_streams(),
        }
    }

    /// Moves the state that does not stay to the file. Returns its bytes.
    fn store(&mut self, network: &mut Learner, directory: &Path) -> io::Result<u64> {
        let streams = self.leaving(network);
        let moved = streams.iter().map(StateStream::bytes).sum();
        if streams.is_empty() {
            return Ok(0);
        }
        let mut file = match self.file.take() {
            Some(file) => file,
            None => tempfile::tempfile_in(directory)?,
        };
        file.rewind()?;
        let mut writer = BufWriter::with_capacity(GATHERED, &file);
        self.lengths.clear();
        for stream in streams {
            match stream {
                StateStream::F32(values) => {
                    writer.write_all(bytemuck::cast_slice(values))?;
                    self.lengths.push(std::mem::take(values).len());
                }
                StateStream::U8(codes) => {
                    writer.write_all(codes)?;
                    self.lengths.push(std::mem::take(codes).len());
                }
            }
        }
        writer.flush()?;
        drop(writer);
        self.file = Some(file);
        Ok(moved)
    }

    /// Reads the stored state back.
    fn restore(&mut self, network: &mut Learner) -> io::Result<()> {
        let leaving = self.leaving(network);
        let Some(file) = &mut self.file else { return Ok(()) };
        file.rewind()?;
        let mut reader = BufReader::with_capacity(GATHERED, &*file);
        for (stream, len) in leaving.into_iter().zip(&self.lengths) {
            match stream {
                StateStream::F32(values) => {
                    *values = vec![0.0; *len];
                    reader.read_exact(bytemuck::cast_slice_mut(values))?;
                }
                StateStream::U8(codes) => {
                    *codes = vec![0; *len];
                    reader.read_exact(codes)?;
                }
            }
        }
        Ok(())
    }
}

fn scratch(directory: &Path, source: io::Error) -> TrainerError {
    TrainerError::Scratch { directory: directory.to_owned(), source }
}
