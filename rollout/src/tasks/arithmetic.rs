//! Sums of two whole numbers: tasks that need no download, and demonstrations for a supervised warm-up.
//!
//! Invariant: the same [`Arithmetic`] makes the same tasks everywhere; no prompt occurs twice, so training and
//! evaluation share none (`37+48=` and `48+37=` are two prompts).

use std::collections::HashSet;

use environments::Demonstration;
use serde::{Deserialize, Serialize};
use serde_json::Map;
use trajectory::{Prompt, Task, TaskId};

use super::TaskError;
use super::random::{Purpose, RandomStream};

/// Number and size of the sums.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Arithmetic {
    /// Greatest operand; the least is 0.
    #[serde(default = "default_max_operand")]
    pub max_operand: u32,
    /// Number of training tasks.
    pub train: usize,
    /// Number of evaluation tasks.
    pub eval: usize,
    /// Seed of the choice.
    pub seed: u64,
}

/// Generated tasks.
#[derive(Clone, Debug, PartialEq)]
pub struct ArithmeticTasks {
    /// Ids from 0.
    pub train: Vec<Task>,
    /// Ids from the number of training tasks.
    pub eval: Vec<Task>,
}

/// The two operands of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sum {
    /// Column `a`.
    pub a: u32,
    /// Column `b`.
    pub b: u32,
}

impl Arithmetic {
    /// Draws different pairs of operands, all equally likely.
    ///
    /// # Errors
    /// More tasks than pairs.
    pub fn tasks(&self) -> Result<ArithmeticTasks, TaskError> {
        let side = u64::from(self.max_operand) + 1;
        let pairs = side.saturating_mul(side);
        let wanted = (self.train as u64).saturating_add(self.eval as u64);
        if wanted > pairs {
            return Err(TaskError::TooManyTasks { wanted, pairs });
        }
        let mut draws = RandomStream::new(self.seed, &Purpose { name: *b"arithmet", number: 0 });
        // Floyd's algorithm: every set of pairs is equally likely, in as many draws as it has members; its order is
        // not, hence the shuffle.
        let mut chosen = HashSet::new();
        let mut order: Vec<u64> = (pairs - wanted..pairs)
            .map(|newest| {
                let drawn = draws.below(newest + 1);
                let pair = if chosen.contains(&drawn) { newest } else { drawn };
                chosen.insert(pair);
                pair
            })
            .collect();
        draws.shuffle(&mut order);
        let operand = |value: u64| u32::try_from(value).unwrap_or(self.max_operand);
        let sum = |pair: u64| Sum { a: operand(pair / side), b: operand(pair % side) };
        let mut train: Vec<_> =
            order.into_iter().zip(0..).map(|(pair, id)| sum(pair).task(TaskId(id))).collect();
        let eval = train.split_off(self.train);
        Ok(ArithmeticTasks { train, eval })
    }
}

impl Sum {
    /// The operands of a task that [`Arithmetic`] made.
    ///
    /// # Errors
    /// The task has no whole-number columns `a` and `b`.
    pub fn of(task: &Task) -> Result<Self, TaskError> {
        let operand = |name| task.columns.get(name)?.as_u64()?.try_into().ok();
        match (operand("a"), operand("b")) {
            (Some(a), Some(b)) => Ok(Self { a, b }),
            _ => Err(TaskError::NotArithmetic { task: task.id.0 }),
        }
    }

    /// The task: prompt `37+48=`, answer `85`.
    #[must_use]
    pub fn task(self, id: TaskId) -> Task {
        let Self { a, b } = self;
        let columns = Map::from_iter([("a".to_owned(), a.into()), ("b".to_owned(), b.into())]);
        Task {
            id,
            prompt: Prompt::Text(format!("{a}+{b}=")),
            answer: Some(self.total().to_string()),
            columns,
        }
    }

    /// A completion to learn from, without a stop token. It adds column by column, from the right, then gives the answer: a
    /// right one with carries, so that `37+48=` is followed by `7+8=15,3+4+1=8;85`; a wrong one drops every carry,
    /// `7+8=15,3+4=7;75`, and is the same where there is none.
    #[must_use]
    pub fn demonstration(self, kind: Demonstration) -> String {
        let (mut a, mut b, mut carry, mut place, mut answer) =
            (u64::from(self.a), u64::from(self.b), 0, 1, 0);
        let mut columns = Vec::new();
        while columns.len() < 2 || a > 0 || b > 0 {
            let sum = a % 10 + b % 10 + carry;
            let carried = if carry > 0 { "+1" } else { "" };
            columns.push(format!("{}+{}{carried}={sum}", a % 10, b % 10));
            answer += sum % 10 * place;
            carry = if kind == Demonstration::Right { sum / 10 } else { 0 };
            (a, b, place) = (a / 10, b / 10, place * 10);
        }
        format!("{};{}", columns.join(","), answer + carry * place)
    }

    fn total(self) -> u64 {
        u64::from(self.a) + u64::from(self.b)
    }
}

fn default_max_operand() -> u32 {
    99
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn tasks_are_different_right_and_the_same_again(max_operand in 0..40u32, seed: u64, share in 0..=4usize) {
            let pairs = (max_operand as usize + 1).pow(2);
            let train = pairs * share / 4;
            let arithmetic = Arithmetic { max_operand, train, eval: pairs - train, seed };
            let tasks = arithmetic.tasks().unwrap();
            prop_assert_eq!((tasks.train.len(), tasks.eval.len()), (train, pairs - train));
            let sums: HashSet<_> =
                tasks.train.iter().chain(&tasks.eval).map(|task| Sum::of(task).unwrap()).collect();
            prop_assert_eq!(sums.len(), pairs);
            for task in &tasks.train {
                let Sum { a, b } = Sum::of(task).unwrap();
                prop_assert!(a <= max_operand && b <= max_operand);
                prop_assert_eq!(&task.prompt, &Prompt::Text(format!("{a}+{b}=")));
                prop_assert_eq!(task.answer.clone(), Some((a + b).to_string()));
            }
            prop_assert_eq!(arithmetic.tasks().unwrap(), tasks);
        }

        #[test]
        fn a_wrong_demonstration_is_wrong_exactly_where_there_is_a_carry(a in 0..100_000u32, b in 0..100_000u32) {
            let digits = |n: u32| (0..6).map(move |place| n / 10u32.pow(place) % 10);
            let carries = digits(a).zip(digits(b)).any(|(x, y)| x + y > 9);
            let sum = Sum { a, b };
            let right = sum.demonstration(Demonstration::Right);
            prop_assert_eq!(right.split_once(';').unwrap().1, (a + b).to_string());
            let same = sum.demonstration(Demonstration::Wrong) == sum.demonstration(Demonstration::Right);
            prop_assert_eq!(same, !carries);
        }
    }

    #[test]
    fn demonstrations_show_their_work() {
        for (a, b, right, wrong) in [
            (37, 48, "7+8=15,3+4+1=8;85", "7+8=15,3+4=7;75"),
            (55, 67, "5+7=12,5+6+1=12;122", "5+7=12,5+6=11;12"),
            (62, 83, "2+3=5,6+8=14;145", "2+3=5,6+8=14;45"),
            (7, 8, "7+8=15,0+0+1=1;15", "7+8=15,0+0=0;5"),
            (31, 48, "1+8=9,3+4=7;79", "1+8=9,3+4=7;79"),
            (0, 0, "0+0=0,0+0=0;0", "0+0=0,0+0=0;0"),
        ] {
            let sum = Sum { a, b };
            assert_eq!(sum.demonstration(Demonstration::Right), right);
            assert_eq!(sum.demonstration(Demonstration::Wrong), wrong);
        }
        let greatest = Sum { a: u32::MAX, b: u32::MAX }.demonstration(Demonstration::Right);
        assert!(greatest.ends_with(";8589934590"), "{greatest}");
    }

    /// A resumed run must meet the same tasks as the release that started it. The prompts are from `golden.py`.
    #[test]
    fn the_tasks_of_a_seed_are_fixed_for_good() {
        let tasks = Arithmetic { max_operand: 99, train: 3, eval: 1, seed: 42 }.tasks().unwrap();
        let prompts: Vec<_> = tasks.train.into_iter().chain(tasks.eval).map(|task| task.prompt).collect();
        let expected = ["81+81=", "29+31=", "17+19=", "81+50="];
        assert_eq!(prompts, expected.map(|text| Prompt::Text(text.to_owned())));
    }

    #[test]
    fn ids_run_on_and_seeds_differ() {
        let of = |seed| Arithmetic { max_operand: 99, train: 50, eval: 10, seed }.tasks().unwrap();
        let tasks = of(1);
        let ids: Vec<_> = tasks.train.iter().chain(&tasks.eval).map(|task| task.id.0).collect();
        assert_eq!(ids, (0..60).collect::<Vec<_>>());
        assert_ne!(tasks, of(2));
    }

    #[test]
    fn more_tasks_than_pairs_and_foreign_tasks_are_refused() {
        let greedy = Arithmetic { max_operand: 1, train: 4, eval: 1, seed: 0 }.tasks();
        assert!(matches!(greedy, Err(TaskError::TooManyTasks { wanted: 5, pairs: 4 })));
        let mut task = Sum { a: 1, b: 2 }.task(TaskId(9));
        task.columns.insert("b".into(), "two".into());
        assert!(matches!(Sum::of(&task), Err(TaskError::NotArithmetic { task: 9 })));
    }
}
