//! Failure injection for tests: `RLRUN_FAILPOINTS="checkpoint-write=disk-full@2;journal-commit=delay(50)"`.
//!
//! Invariant: only test builds have failpoints, because only a dev-dependency enables them in the crate `fail`; another
//! build refuses the variable. No failpoint is random.

use std::sync::atomic::{AtomicU64, Ordering};

use rustix::process::{Signal, getpid, kill_process};

use crate::failure::Failure;

/// The variable with places and what happens there.
pub const VARIABLE: &str = "RLRUN_FAILPOINTS";

/// Every place, and whether the system can refuse something there: an error or a full disk.
pub const PLACES: [(&str, bool); 13] = [
    // The journal is about to commit what has come.
    ("journal-commit", true),
    // The weights of a checkpoint are written, its optimizer is not.
    ("checkpoint-write", true),
    // A checkpoint is complete but for its name.
    ("checkpoint-rename", true),
    // The files of a checkpoint are in the archive, its index is not.
    ("archive-upload", false),
    // A checkpoint is in the archive, and `lead.json` does not name it yet.
    ("archive-commit", false),
    // The trainer is about to publish a version.
    ("weights-publish", false),
    // A sampler has found a new version and copies it.
    ("weights-receive", false),
    // A scored group is about to be given to the buffer.
    ("group-hand-over", false),
    // Rewards are about to judge a trajectory.
    ("reward-call", false),
    // A built-in reward, or one with limits, judges; `reward-score:NAME` is one of them.
    ("reward-score", false),
    // The trainer is about to ask for a batch.
    ("before-lease", false),
    // A rank is about to compute its share of an update; `rank-step:N` is one of them.
    ("rank-step", false),
    // The optimizer has updated the weights; no other role has seen the new version.
    ("after-optimizer", false),
];

/// The system's errors of a device and of a full disk: `EIO`, `ENOSPC`.
const ERRORS: [(&str, u32); 2] = [("error", 5), ("disk-full", 28)];

/// Makes happen what `text` says: `place=action`, `place=action@n` or `place=action@n-m`, separated by `;`. An action is `kill`
/// (this process, as kill -9 does), `delay(milliseconds)`, `error` or `disk-full`; with `@n` it happens at the n-th time that a
/// thread comes there, from 1, and no other, with `@n-m` from the n-th to the m-th time. `place:name` is the place of that name
/// alone, where a place has names.
///
/// # Errors
/// If this build has no such places, or a word is unknown.
pub fn arm(text: &str) -> Result<(), Failure> {
    let refused = |why: String| Failure::Argument(format!("{VARIABLE}: {why}"));
    if !fail::has_failpoints() {
        let why = "this build has no failpoints; unset it, or use the program that `cargo test` builds";
        return Err(refused(why.to_owned()));
    }
    for word in text.split(';').map(str::trim).filter(|word| !word.is_empty()) {
        let (place, action) =
            word.split_once('=').ok_or_else(|| refused(format!("`{word}` is not place=action")))?;
        let kind = place.split(':').next().unwrap_or(place);
        let Some((_, refuses)) = PLACES.into_iter().find(|(name, _)| *name == kind) else {
            let all: Vec<_> = PLACES.into_iter().map(|(name, _)| name).collect();
            return Err(refused(format!("there is no place `{place}`; there are {}", all.join(", "))));
        };
        let (action, at) = match action.split_once('@') {
            None => (action, None),
            Some((action, at)) => {
                let (first, last) = at.split_once('-').unwrap_or((at, at));
                match (first.parse::<u64>(), last.parse::<u64>()) {
                    (Ok(first), Ok(last)) if first > 0 && last >= first => (action, Some((first, last))),
                    _ => {
                        return Err(refused(format!("`{at}` is not a count from 1, and no range of counts")));
                    }
                }
            }
        };
        set(place, action, at, refuses).map_err(refused)?;
    }
    Ok(())
}

/// Arms one place; `refuses` says whether errors can happen there.
fn set(place: &str, action: &str, at: Option<(u64, u64)>, refuses: bool) -> Result<(), String> {
    if action == "kill" {
        let (at, passed) = (at.map_or(1, |(first, _)| first), AtomicU64::new(0));
        return fail::cfg_callback(place, move || {
            if passed.fetch_add(1, Ordering::Relaxed) + 1 == at {
                // It cannot be refused: everybody may kill itself.
                let _ = kill_process(getpid(), Signal::KILL);
            }
        });
    }
    let errors = ERRORS.into_iter().filter(|_| refuses);
    let task = if let Some(ms) = action.strip_prefix("delay(").and_then(|rest| rest.strip_suffix(')')) {
        format!("sleep({})", ms.parse::<u64>().map_err(|error| format!("`{action}`: {error}"))?)
    } else if let Some((_, number)) = errors.clone().find(|(name, _)| *name == action) {
        format!("return({number})")
    } else {
        let errors: String = errors.map(|(name, _)| format!(", {name}")).collect();
        return Err(format!(
            "`{action}` cannot happen at {place}; what can: kill, delay(milliseconds){errors}"
        ));
    };
    let actions = match at {
        None => task,
        Some((1, last)) => format!("{last}*{task}"),
        Some((first, last)) => format!("{}*off->{}*{task}", first - 1, last - first + 1),
    };
    fail::cfg(place, &actions)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Refused settings arm no failpoint; otherwise other tests of this process would hit it.
    #[test]
    fn unknown_failpoints_are_refused() {
        for (text, evidence) in [
            ("before-lease", "not place=action"),
            ("elsewhere=kill", "there are journal-commit, checkpoint-write"),
            ("before-lease=kill@0", "not a count from 1"),
            ("before-lease=delay(1)@3-2", "no range of counts"),
            ("elsewhere:name=kill", "no place `elsewhere:name`"),
            ("before-lease=explode", "what can: kill, delay(milliseconds)"),
            ("before-lease=disk-full", "cannot happen at before-lease"),
            ("journal-commit=full", "error, disk-full"),
            ("before-lease=delay(long)", "invalid digit"),
        ] {
            let message = arm(text).unwrap_err().to_string();
            assert!(message.starts_with(VARIABLE) && message.contains(evidence), "{text}: {message}");
        }
        arm(" ; ").unwrap();
    }
}
