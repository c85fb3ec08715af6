//! The order in which the stages of a pipeline compute the micro-batches of a step: one forward, one backward (1F1B; PipeDream-Flush,
//! Narayanan et al. 2021, arXiv 2006.09503), with the head on the first stage.
//!
//! ```text
//! stage 0   F0 F1 H0 F2 H1 B0 F3 H2 B1 ...    F  layers forward
//! stage 1   F0 F1    B0 F2    B1 F3    B2     H  head, forward and backward
//!                                             B  layers backward
//! ```
//!
//! Stage `s` of `p` begins with `p + 1 - s` forwards, so that as many micro-batches are in flight in it: one more than with the head on the
//! last stage. While the first and the last of `m` micro-batches pass, other stages are idle: `(p - 1) / (m + p - 1)` of the time.
//!
//! Invariant: every stage computes forwards, heads and backwards each in the order of the micro-batches, so that gradients are added in
//! the order of one rank.

use collective::Position;

/// What a stage does with a micro-batch, by its number in the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum StageWork {
    /// Its layers forward.
    Forward(usize),
    /// The final norm and the head, forward and backward: the first stage.
    Head(usize),
    /// Its layers backward.
    Backward(usize),
}

/// Micro-batches that are in flight at a time in a stage, of a step of many: those whose activations are in memory.
#[must_use]
pub fn in_flight(stage: Position) -> usize {
    stage.world + 1 - stage.rank
}

/// The work of a stage on `batches` micro-batches that are trained.
pub(crate) fn training(stage: Position, batches: usize) -> Vec<StageWork> {
    let ahead = in_flight(stage);
    let head = |batch: usize| (stage.rank == 0 && batch < batches).then_some(StageWork::Head(batch));
    let forward = |batch: usize| (batch < batches).then_some(StageWork::Forward(batch));
    // The first head comes as soon as its micro-batch has been through all stages.
    let mut work: Vec<StageWork> = (0..ahead - 1).filter_map(forward).chain(head(0)).collect();
    work.extend(forward(ahead - 1));
    for batch in 0..batches {
        work.extend(head(batch + 1));
        work.push(StageWork::Backward(batch));
        work.extend(forward(batch + ahead));
    }
    work
}

/// The work of a stage on `batches` micro-batches that are scored.
pub(crate) fn scoring(stage: Position, batches: usize) -> Vec<StageWork> {
    if stage.rank > 0 {
        return (0..batches).map(StageWork::Forward).collect();
    }
    let forward = |batch: usize| (batch < batches).then_some(StageWork::Forward(batch));
    let mut work: Vec<StageWork> = (0..stage.world).filter_map(forward).collect();
    for batch in 0..batches {
        work.push(StageWork::Head(batch));
        work.extend(forward(batch + stage.world));
    }
    work
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// Whether the stages get to the end if each waits for what its next work needs. Returns the most micro-batches in flight of each.
    fn in_flight_of(works: &[Vec<StageWork>]) -> Option<Vec<usize>> {
        let stages = works.len();
        let mut done: HashSet<(usize, StageWork)> = HashSet::new();
        let (mut next, mut most) = (vec![0; stages], vec![0; stages]);
        let mut open = vec![0; stages];
        loop {
            let before = next.clone();
            for (stage, work) in works.iter().enumerate() {
                let Some(current) = work.get(next[stage]).copied() else { continue };
                let needs = match current {
                    StageWork::Forward(_) if stage == 0 => None,
                    StageWork::Forward(batch) => Some((stage - 1, StageWork::Forward(batch))),
                    StageWork::Head(batch) => Some((stages - 1, StageWork::Forward(batch))),
                    StageWork::Backward(batch) if stage + 1 == stages => Some((0, StageWork::Head(batch))),
                    StageWork::Backward(batch) => Some((stage + 1, StageWork::Backward(batch))),
                };
                if needs.is_some_and(|needs| !done.contains(&needs)) {
                    continue;
                }
                match current {
                    StageWork::Forward(_) => open[stage] += 1,
                    StageWork::Backward(_) => open[stage] -= 1,
                    StageWork::Head(_) => {}
                }
                most[stage] = most[stage].max(open[stage]);
                done.insert((stage, current));
                next[stage] += 1;
            }
            if next == before {
                return works.iter().zip(&next).all(|(work, next)| work.len() == *next).then_some(most);
            }
        }
    }

    fn works(
        stages: usize,
        batches: usize,
        of: impl Fn(Position, usize) -> Vec<StageWork>,
    ) -> Vec<Vec<StageWork>> {
        (0..stages).map(|rank| of(Position { rank, world: stages }, batches)).collect()
    }

    #[test]
    fn no_stage_waits_for_ever_and_few_micro_batches_are_in_flight() {
        for stages in 2..9 {
            for batches in 0..25 {
                let all = works(stages, batches, training);
                let most = in_flight_of(&all).expect("the stages get to the end");
                for (rank, most) in most.into_iter().enumerate() {
                    let expected = in_flight(Position { rank, world: stages }).min(batches);
                    assert_eq!(most, expected, "stage {rank} of {stages}, {batches} micro-batches");
                }
                assert!(in_flight_of(&works(stages, batches, scoring)).is_some(), "{stages} {batches}");
            }
        }
    }

    #[test]
    fn every_stage_does_all_work_in_order() {
        use StageWork::{Backward, Forward, Head};
        let first = training(Position { rank: 0, world: 2 }, 4);
        let expected = [
            Forward(0),
            Forward(1),
            Head(0),
            Forward(2),
            Head(1),
            Backward(0),
            Forward(3),
            Head(2),
            Backward(1),
            Head(3),
            Backward(2),
            Backward(3),
        ];
        assert_eq!(first, expected);
        let last = training(Position { rank: 1, world: 2 }, 3);
        assert_eq!(last, [Forward(0), Forward(1), Backward(0), Forward(2), Backward(1), Backward(2)]);
        assert_eq!(scoring(Position { rank: 0, world: 2 }, 1), [Forward(0), Head(0)]);
    }
}
