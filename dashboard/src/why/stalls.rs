//! Stalls: time on the critical path that a resource took beyond what it takes in this run otherwise.
//!
//! Every comparison is within the run. The time of a cause in a step is compared with its median over the other steps and with the
//! spread around it, and the ranks of the trainer are compared with each other. Work, whose time varies with the lengths of
//! completions, is never a stall.
//!
//! Invariant: a stall that is named took at least two median steps of the run: in one step, or over steps that together are 2 % of
//! the wall time.

use super::cause::{Cause, CauseKind};
use super::reader::{PathRows, StepRow};

/// Fewest steps that have a median to compare with.
const MIN_STEPS: usize = 5;
/// Standard deviations from which a step is an outlier: a normal distribution has one in 3 million. Times have longer tails, for
/// which a stall has to be long, too.
const OUTLIER_SIGMAS: f64 = 5.0;
/// Standard deviation of a normal distribution, in medians of absolute deviations.
const SIGMAS_OF_MAD: f64 = 1.4826;
/// Share of a median step from which an excess counts.
const MIN_EXCESS: f64 = 0.25;
/// Median steps that a stall takes.
const MIN_STALL: f64 = 2.0;
/// Share of the wall time that a stall takes which is shorter than that in each of its steps.
const MIN_STALL_SHARE: f64 = 0.02;
/// Share of the wall time that the others wait for a rank that is always slow.
const MIN_RANK_SHARE: f64 = 0.1;
/// Share of the steps in which such a rank is the one that the others wait for longest.
const MIN_RANK_STEPS: f64 = 0.8;
/// Share of the waits for ranks that are for such a rank.
const MIN_RANK_WAITS: f64 = 0.8;
/// Newest steps of a stall that are listed.
const MAX_LISTED: usize = 100;

/// A cause with time beyond its usual one. Times are seconds.
#[derive(Clone, Debug, PartialEq)]
pub struct Stall {
    /// The resource.
    pub cause: Cause,
    /// What it took beyond its median, in the steps listed together.
    pub excess_s: f64,
    /// Its median over the steps that it is compared with.
    pub median_s: f64,
    /// The longest in one step, and the step.
    pub longest_s: f64,
    /// The step with the longest.
    pub longest_step: u64,
    /// The steps, at most the newest 100.
    pub steps: Vec<u64>,
    /// Whether it is a rank that is slower than the others in most steps.
    pub is_lasting: bool,
}

/// The stalls of a run, the longest first.
pub(super) fn stalls(paths: &PathRows) -> Vec<Stall> {
    // In the first step of an attempt samplers begin and the buffer fills.
    let rows: Vec<&StepRow> = paths.rows.iter().filter(|row| !row.is_first).collect();
    if rows.len() < MIN_STEPS {
        return Vec::new();
    }
    let step_s = median(rows.iter().map(|row| row.seconds()).collect());
    let numbered = || (0_u16..).zip(&paths.causes).filter(|(_, cause)| !cause.kind.is_work());
    let sudden = |(number, cause): (u16, &Cause)| sudden(&rows, number, cause, step_s);
    let mut found: Vec<Stall> = numbered().filter_map(sudden).collect();
    for (number, cause) in numbered().filter(|(_, cause)| cause.kind == CauseKind::SlowRank) {
        let known = found.iter().any(|stall| stall.cause == *cause);
        found.extend(lasting_rank(&rows, paths, number).filter(|_| !known));
    }
    found.sort_by(|a, b| b.excess_s.total_cmp(&a.excess_s));
    found
}

/// Steps in which `cause` takes longer than it does otherwise.
fn sudden(rows: &[&StepRow], number: u16, cause: &Cause, step_s: f64) -> Option<Stall> {
    let mut values: Vec<f64> = rows.iter().map(|row| row.of(number)).collect();
    // Only some steps have a checkpoint or a snapshot: it is compared with others.
    if *cause == Cause::new(CauseKind::Disk, "checkpoint") || cause.kind == CauseKind::Snapshot {
        values.retain(|seconds| *seconds > 0.0);
        if values.len() < 3 {
            return None;
        }
    }
    let usual = median(values.clone());
    let deviations = values.iter().map(|seconds| (seconds - usual).abs()).collect();
    let spread = SIGMAS_OF_MAD * median(deviations);
    let least = (OUTLIER_SIGMAS * spread).max(MIN_EXCESS * step_s);
    let excess = |row: &StepRow| row.of(number) - usual;
    let outliers: Vec<&StepRow> = rows.iter().copied().filter(|row| excess(row) > least).collect();
    let longest = outliers.iter().max_by(|a, b| a.of(number).total_cmp(&b.of(number)))?;
    let excess_s: f64 = outliers.iter().map(|row| excess(row)).sum();
    let wall_s: f64 = rows.iter().map(|row| row.seconds()).sum();
    let is_long = excess(longest) >= MIN_STALL * step_s;
    let is_frequent = excess_s >= (MIN_STALL * step_s).max(MIN_STALL_SHARE * wall_s);
    (is_long || is_frequent).then(|| Stall {
        cause: cause.clone(),
        excess_s,
        median_s: usual,
        longest_s: longest.of(number),
        longest_step: longest.step,
        steps: listed(outliers.iter().map(|row| row.step)),
        is_lasting: false,
    })
}

/// A rank that the others wait for in most steps.
fn lasting_rank(rows: &[&StepRow], paths: &PathRows, number: u16) -> Option<Stall> {
    let ranks: Vec<u16> = (0_u16..)
        .zip(&paths.causes)
        .filter(|(_, cause)| cause.kind == CauseKind::SlowRank)
        .map(|(number, _)| number)
        .collect();
    let seconds = |number: u16| rows.iter().map(|row| row.of(number)).sum::<f64>();
    let (own, all): (f64, f64) = (seconds(number), ranks.iter().map(|rank| seconds(*rank)).sum());
    let wall: f64 = rows.iter().map(|row| row.seconds()).sum();
    let is_slowest = |row: &&&StepRow| {
        ranks.iter().all(|rank| *rank == number || row.of(*rank) < row.of(number)) && row.of(number) > 0.0
    };
    let slowest: Vec<&&StepRow> = rows.iter().filter(is_slowest).collect();
    let lasts = slowest.len() as f64 >= MIN_RANK_STEPS * rows.len() as f64
        && own >= MIN_RANK_WAITS * all
        && own >= MIN_RANK_SHARE * wall;
    let longest = slowest.iter().max_by(|a, b| a.of(number).total_cmp(&b.of(number)))?;
    lasts.then(|| Stall {
        cause: paths.causes[usize::from(number)].clone(),
        excess_s: own,
        median_s: 0.0,
        longest_s: longest.of(number),
        longest_step: longest.step,
        steps: listed(slowest.iter().map(|row| row.step)),
        is_lasting: true,
    })
}

fn listed(steps: impl DoubleEndedIterator<Item = u64>) -> Vec<u64> {
    let mut newest: Vec<u64> = steps.rev().take(MAX_LISTED).collect();
    newest.reverse();
    newest
}

/// The lower median; 0 of nothing.
pub(super) fn median(mut values: Vec<f64>) -> f64 {
    if values.is_empty() {
        return 0.0;
    }
    let middle = (values.len() - 1) / 2;
    *values.select_nth_unstable_by(middle, f64::total_cmp).1
}
