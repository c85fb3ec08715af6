//! Ranks that are threads of this process. The threads live for one call.
//!
//! Invariant: every call ends. A rank that fails or panics closes its collective, which ends the waits of the other ranks.
//! The call returns the error of that rank with its number, not the errors that it caused on other ranks.

use std::any::Any;
use std::borrow::Borrow;
use std::panic::{AssertUnwindSafe, catch_unwind};

use device::DeviceError;

use crate::TrainerError;
use crate::rank::Rank;

/// Runs `work` on every rank. A single rank runs on this thread, several run on one thread each. Results are in order of
/// rank.
///
/// # Errors
/// The error of the first rank whose failure no other rank caused.
pub(crate) fn on_each<T: Borrow<Rank> + Send, R: Send>(
    mut ranks: Vec<T>,
    work: impl Fn(&mut T) -> Result<R, TrainerError> + Sync,
) -> Result<Vec<R>, TrainerError> {
    if ranks.len() == 1 {
        return ranks.iter_mut().map(work).collect();
    }
    let work = &work;
    let run = |mut rank: T| {
        let result = catch_unwind(AssertUnwindSafe(|| work(&mut rank)))
            .unwrap_or_else(|panic| Err(TrainerError::Panicked { message: message(&*panic) }));
        if result.as_ref().is_err_and(|error| !is_common(error)) {
            rank.borrow().leave();
        }
        result
    };
    let run = &run;
    let results: Vec<Result<R, TrainerError>> = std::thread::scope(|scope| {
        let start = |(number, rank): (usize, T)| {
            let thread = std::thread::Builder::new().name(format!("rank {number}"));
            thread.spawn_scoped(scope, move || run(rank)).map_err(|source| TrainerError::Thread { source })
        };
        let threads: Vec<_> = ranks.drain(..).enumerate().map(start).collect();
        let join = |thread: Result<std::thread::ScopedJoinHandle<'_, _>, TrainerError>| {
            thread?.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        threads.into_iter().map(join).collect()
    });
    all_done(results)
}

/// Builds every rank on a thread of its own, because ranks wait for each other while they are built.
///
/// # Errors
/// As [`on_each`].
pub(crate) fn make<S: Send>(
    seeds: Vec<S>,
    work: impl Fn(S) -> Result<Rank, TrainerError> + Sync,
) -> Result<Vec<Rank>, TrainerError> {
    let work = &work;
    let results = std::thread::scope(|scope| {
        let threads: Vec<_> = seeds.into_iter().map(|seed| scope.spawn(move || work(seed))).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
            thread.join().unwrap_or_else(|panic| Err(TrainerError::Panicked { message: message(&*panic) }))
        };
        threads.into_iter().map(join).collect()
    });
    all_done(results)
}

/// The results of all ranks, or the error of the rank that caused the errors of the others.
fn all_done<R>(results: Vec<Result<R, TrainerError>>) -> Result<Vec<R>, TrainerError> {
    let world = results.len();
    let failed = |result: &Result<R, TrainerError>, seen: bool| {
        result.as_ref().is_err_and(|error| seen || !is_seen(error))
    };
    let cause = [false, true].into_iter().find_map(|seen| results.iter().position(|r| failed(r, seen)));
    let mut done = Vec::with_capacity(world);
    for (rank, result) in results.into_iter().enumerate() {
        match result {
            Ok(value) => done.push(value),
            Err(error) if cause == Some(rank) && is_common(&error) => return Err(error),
            Err(error) if cause == Some(rank) => {
                return Err(TrainerError::Rank { rank, world, source: Box::new(error) });
            }
            Err(_) => {}
        }
    }
    Ok(done)
}

/// Whether all ranks return this error from the same call, so that the collective stays usable.
fn is_common(error: &TrainerError) -> bool {
    matches!(error, TrainerError::GradientNotFinite { .. })
}

/// Whether the failure of another rank causes this error.
fn is_seen(error: &TrainerError) -> bool {
    matches!(
        error,
        TrainerError::Collective(_)
            | TrainerError::RanksEnded
            | TrainerError::Device(DeviceError::Group { .. } | DeviceError::Peer { .. })
    )
}

/// The message of a panic.
fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}

#[cfg(test)]
mod tests {
    use collective::CollectiveError;

    use super::*;

    #[test]
    fn the_rank_that_failed_is_named_and_not_one_that_lost_it_on_its_device() {
        let failed = || TrainerError::Panicked { message: "a panic".to_owned() };
        let named = |other: CollectiveError| {
            let lost = TrainerError::Device(other.into_device_error());
            all_done::<()>(vec![Err(lost), Err(failed())]).unwrap_err().to_string()
        };
        let operation = "all_reduce";
        let lost = named(CollectiveError::Gone { rank: 0, peer: 1, operation });
        assert!(lost.contains("rank 1 of 2") && lost.contains("a panic"), "{lost}");
        // This is a mistake of the rank itself.
        let reason = "2 shards for 3 ranks".to_owned();
        let wrong = named(CollectiveError::Arguments { rank: 0, operation, reason });
        assert!(wrong.contains("rank 0 of 2") && wrong.contains("2 shards"), "{wrong}");
    }
}
