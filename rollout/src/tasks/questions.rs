//! Arithmetic questions in words, of several kinds and difficulties, for a model that understands instructions.
//!
//! Invariant: the same [`Questions`] makes the same tasks everywhere. No question occurs twice. The numbers of a held-out
//! question occur in no training question of its kind, in any order, wording or story.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};
use serde_json::Map;
use trajectory::{Prompt, Task, TaskId};

use super::random::{Purpose, RandomStream};
use super::{ArithmeticTasks, TaskError};

const NAMES: [&str; 8] = ["Tom", "Mia", "Ben", "Anna", "Leo", "Eva", "Sam", "Lily"];
const THINGS: [&str; 8] = ["apples", "books", "coins", "pens", "eggs", "stamps", "cards", "shells"];
/// Questions drawn in a row that are all known before a kind counts as exhausted.
const MAX_DRAWS: usize = 10_000;
/// A list has from 2 to this number of numbers.
const MAX_LIST: u64 = 8;

/// Kind of an arithmetic question.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QuestionKind {
    /// `What is 12 + 7?`
    Sum,
    /// `What is 12 - 7?`
    Difference,
    /// `What is 6 x 7?`
    Product,
    /// `Tom has 12 apples and buys 7 more. How many apples does Tom have now?`
    Purchase,
    /// `Tom has 12 apples and gives away 7. How many apples does Tom have left?`
    Gift,
    /// `There are 6 boxes with 7 apples each. How many apples are there in all?`
    Boxes,
    /// `Which number is larger, 12 or 7?`
    Comparison,
    /// `How many numbers are in the list 12, 7, 30?`
    Count,
    /// `Tom has 12 apples and Mia has 7. How many more apples does Tom have than Mia?`
    Surplus,
    /// `Which number comes next: 7, 9, 11, 13?`
    Sequence,
    /// `Tom has 12 apples, buys 7 more and gives away 4. How many apples does Tom have now?`
    TwoSteps,
}

/// Number, kinds and difficulty of the questions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Questions {
    /// Kinds, in turn; at least one.
    pub kinds: Vec<QuestionKind>,
    /// Greatest operand of the hardest third; half of it for the second third, a quarter for the easiest.
    pub max_operand: u32,
    /// Number of training tasks.
    pub train: usize,
    /// Number of evaluation tasks.
    pub eval: usize,
    /// Seed of the choice.
    pub seed: u64,
}

/// One question with its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Question {
    kind: QuestionKind,
    /// The numbers that it is made of, ascending.
    numbers: Vec<u64>,
    text: String,
    answer: u64,
}

impl Questions {
    /// Draws the questions, held-out ones first. Their columns are `kind`.
    ///
    /// # Errors
    /// Without kinds, or if a kind has too few different questions.
    pub fn tasks(&self) -> Result<ArithmeticTasks, TaskError> {
        let mut draws = RandomStream::new(self.seed, &Purpose { name: *b"question", number: 0 });
        let mut held_out = HashSet::new();
        let mut eval = Vec::new();
        for place in 0..self.eval {
            let question =
                self.draw_new(&mut draws, place, |q| held_out.insert((q.kind, q.numbers.clone())))?;
            eval.push(question.task(TaskId((self.train + place) as u64)));
        }
        let mut asked = HashSet::new();
        let mut train = Vec::new();
        for place in 0..self.train {
            let question = self.draw_new(&mut draws, place, |q| {
                !held_out.contains(&(q.kind, q.numbers.clone())) && asked.insert(q.text.clone())
            })?;
            train.push(question.task(TaskId(place as u64)));
        }
        Ok(ArithmeticTasks { train, eval })
    }

    /// The first question drawn for this place that `is_new` accepts.
    fn draw_new(
        &self,
        draws: &mut RandomStream,
        place: usize,
        mut is_new: impl FnMut(&Question) -> bool,
    ) -> Result<Question, TaskError> {
        let kind = self.kinds.get(place % self.kinds.len().max(1)).copied().ok_or(TaskError::NoQuestions)?;
        let mut drawn = (0..MAX_DRAWS).map(|_| Question::draw(kind, self.max_operand, draws));
        drawn.find(&mut is_new).ok_or(TaskError::TooFewQuestions {
            kind: kind.name(),
            tasks: self.train + self.eval,
            max_operand: self.max_operand,
        })
    }
}

impl QuestionKind {
    /// All kinds, in the order of their documentation.
    pub const ALL: [Self; 11] = [
        Self::Sum,
        Self::Difference,
        Self::Product,
        Self::Purchase,
        Self::Gift,
        Self::Boxes,
        Self::Comparison,
        Self::Count,
        Self::Surplus,
        Self::Sequence,
        Self::TwoSteps,
    ];

    /// The word of the kind.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Difference => "difference",
            Self::Product => "product",
            Self::Purchase => "purchase",
            Self::Gift => "gift",
            Self::Boxes => "boxes",
            Self::Comparison => "comparison",
            Self::Count => "count",
            Self::Surplus => "surplus",
            Self::Sequence => "sequence",
            Self::TwoSteps => "two_steps",
        }
    }
}

impl Question {
    fn draw(kind: QuestionKind, max_operand: u32, draws: &mut RandomStream) -> Self {
        let bound = (u64::from(max_operand) >> draws.below(3)).max(4);
        // In `low..=high`.
        let mut within = |low: u64, high: u64| low + draws.below(high - low + 1);
        let (numbers, answer) = match kind {
            QuestionKind::Sum | QuestionKind::Purchase => {
                let (a, b) = (within(1, bound), within(1, bound));
                (vec![a, b], a + b)
            }
            QuestionKind::Difference | QuestionKind::Gift => {
                let a = within(2, bound);
                let b = within(1, a);
                (vec![a, b], a - b)
            }
            QuestionKind::Product | QuestionKind::Boxes => {
                let most = (bound / 4).max(3);
                let (a, b) = (within(2, most), within(2, most));
                (vec![a, b], a * b)
            }
            QuestionKind::Comparison => {
                let a = within(1, bound);
                // Any number but `a`.
                let b = (a - 1 + within(1, bound - 1)) % bound + 1;
                (vec![a, b], a.max(b))
            }
            QuestionKind::Count => {
                let count = within(2, MAX_LIST);
                ((0..count).map(|_| within(1, bound)).collect(), count)
            }
            QuestionKind::Surplus => {
                let a = within(2, bound);
                let b = within(1, a - 1);
                (vec![a, b], a - b)
            }
            QuestionKind::Sequence => {
                let (first, step) = (within(1, bound), within(1, bound / 4));
                (vec![first, step], first + 4 * step)
            }
            QuestionKind::TwoSteps => {
                let (a, b) = (within(1, bound / 2), within(1, bound / 2));
                let c = within(1, a + b);
                (vec![a, b, c], a + b - c)
            }
        };
        let text = text(kind, &numbers, draws);
        let mut numbers = numbers;
        numbers.sort_unstable();
        Self { kind, numbers, text, answer }
    }

    fn task(self, id: TaskId) -> Task {
        let columns = Map::from_iter([("kind".to_owned(), self.kind.name().into())]);
        Task { id, prompt: Prompt::Text(self.text), answer: Some(self.answer.to_string()), columns }
    }
}

/// The question about `numbers`, in one of its wordings.
fn text(kind: QuestionKind, numbers: &[u64], draws: &mut RandomStream) -> String {
    let (a, b) = (numbers[0], numbers[1]);
    let mut choose = |bound: usize| draws.below(bound as u64) as usize;
    let (name, thing) = (choose(NAMES.len()), THINGS[choose(THINGS.len())]);
    let other = NAMES[(name + 1 + choose(NAMES.len() - 1)) % NAMES.len()];
    let (name, wording) = (NAMES[name], choose(3));
    match kind {
        QuestionKind::Sum => {
            [format!("What is {a} + {b}?"), format!("What is {a} plus {b}?"), format!("Add {a} and {b}.")]
                [wording]
                .clone()
        }
        QuestionKind::Difference => [
            format!("What is {a} - {b}?"),
            format!("What is {a} minus {b}?"),
            format!("Subtract {b} from {a}."),
        ][wording]
            .clone(),
        QuestionKind::Product => [
            format!("What is {a} x {b}?"),
            format!("What is {a} times {b}?"),
            format!("Multiply {a} by {b}."),
        ][wording]
            .clone(),
        QuestionKind::Purchase => {
            format!("{name} has {a} {thing} and buys {b} more. How many {thing} does {name} have now?")
        }
        QuestionKind::Gift => {
            format!("{name} has {a} {thing} and gives away {b}. How many {thing} does {name} have left?")
        }
        QuestionKind::Boxes => {
            format!("There are {a} boxes with {b} {thing} each. How many {thing} are there in all?")
        }
        QuestionKind::Comparison => format!("Which number is larger, {a} or {b}?"),
        QuestionKind::Count => {
            let list: Vec<String> = numbers.iter().map(u64::to_string).collect();
            format!("How many numbers are in the list {}?", list.join(", "))
        }
        QuestionKind::Surplus => format!(
            "{name} has {a} {thing} and {other} has {b}. How many more {thing} does {name} have than {other}?"
        ),
        QuestionKind::Sequence => {
            let term = |n| a + n * b;
            format!("Which number comes next: {a}, {}, {}, {}?", term(1), term(2), term(3))
        }
        QuestionKind::TwoSteps => {
            let c = numbers[2];
            format!(
                "{name} has {a} {thing}, buys {b} more and gives away {c}. How many {thing} does {name} have now?"
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn questions(kinds: &[QuestionKind], max_operand: u32, seed: u64) -> Questions {
        Questions { kinds: kinds.to_vec(), max_operand, train: 66, eval: 22, seed }
    }

    fn prompt(task: &Task) -> &str {
        match &task.prompt {
            Prompt::Text(text) => text,
            Prompt::Messages(messages) => panic!("{messages:?}"),
        }
    }

    /// The numbers in a question, in order, and its answer worked out from them.
    fn worked_out(task: &Task) -> (Vec<i64>, i64) {
        let words = prompt(task).split(|c: char| !c.is_ascii_digit()).filter(|word| !word.is_empty());
        let n: Vec<i64> = words.map(|word| word.parse().unwrap()).collect();
        let answer = match task.columns["kind"].as_str().unwrap() {
            "sum" | "purchase" => n[0] + n[1],
            "difference" | "gift" | "surplus" => (n[0] - n[1]).abs(),
            "product" | "boxes" => n[0] * n[1],
            "comparison" => n[0].max(n[1]),
            "count" => n.len() as i64,
            "sequence" => 2 * n[3] - n[2],
            "two_steps" => n[0] + n[1] - n[2],
            kind => panic!("{kind}"),
        };
        (n, answer)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn answers_are_right_and_held_out_numbers_are_never_trained_on(max_operand in 24..200u32, seed: u64) {
            let all = questions(&QuestionKind::ALL, max_operand, seed);
            let tasks = all.tasks().unwrap();
            prop_assert_eq!((tasks.train.len(), tasks.eval.len()), (66, 22));
            let key = |task: &Task| {
                let (mut numbers, _) = worked_out(task);
                numbers.sort_unstable();
                (task.columns["kind"].as_str().unwrap().to_owned(), numbers)
            };
            let held_out: HashSet<_> = tasks.eval.iter().map(key).collect();
            prop_assert_eq!(held_out.len(), 22);
            for task in &tasks.train {
                prop_assert!(!held_out.contains(&key(task)), "{}", prompt(task));
            }
            let texts: HashSet<_> = tasks.train.iter().chain(&tasks.eval).map(prompt).collect();
            prop_assert_eq!(texts.len(), 88);
            for (task, n) in tasks.train.iter().zip(0..).chain(tasks.eval.iter().zip(0..)) {
                prop_assert_eq!(&task.columns["kind"], QuestionKind::ALL[n % 11].name());
                let (numbers, answer) = worked_out(task);
                prop_assert_eq!(task.answer.as_deref(), Some(&answer.to_string()[..]), "{}", prompt(task));
                prop_assert!(answer >= 0 && numbers[0] <= i64::from(max_operand), "{}", prompt(task));
            }
            prop_assert_eq!(all.tasks().unwrap(), tasks);
        }
    }

    /// A resumed run must meet the same tasks as the release that started it. The questions are from `golden.py`.
    #[test]
    fn the_questions_of_a_seed_are_fixed_for_good() {
        let kinds = [QuestionKind::Sum, QuestionKind::Product];
        let tasks = Questions { train: 4, eval: 0, ..questions(&kinds, 48, 42) }.tasks().unwrap();
        let shown: Vec<&str> = tasks.train.iter().map(prompt).collect();
        let expected = ["What is 1 plus 13?", "Multiply 3 by 2.", "What is 24 plus 14?", "What is 8 x 10?"];
        assert_eq!(shown, expected);
    }

    #[test]
    fn ids_run_on_and_difficulty_differs() {
        let tasks = questions(&[QuestionKind::Sum], 400, 1).tasks().unwrap();
        let ids: Vec<_> = tasks.train.iter().chain(&tasks.eval).map(|task| task.id.0).collect();
        assert_eq!(ids, (0..88).collect::<Vec<_>>());
        let easy = tasks.train.iter().filter(|task| worked_out(task).0.iter().all(|n| *n <= 100)).count();
        // A third has operands up to 100, a quarter of half and a sixteenth of the last third happen to.
        assert!((18..48).contains(&easy), "{easy} of 66");
    }

    #[test]
    fn no_kind_and_exhausted_kinds_are_refused() {
        assert!(matches!(questions(&[], 40, 0).tasks(), Err(TaskError::NoQuestions)));
        let refused = questions(&[QuestionKind::Sum, QuestionKind::Product], 4, 0).tasks();
        let said = refused.unwrap_err().to_string();
        assert!(said.starts_with("88 tasks need more different questions of kind `product`"), "{said}");
    }
}
