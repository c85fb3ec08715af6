//! `guess_number`: the policy finds a hidden number; after every guess it reads whether the number is higher or lower, and
//! what its guesses leave possible.
//!
//! Invariant: a guess that is no number of the range costs what a wrong one costs.

use trajectory::{Message, Task};

use super::{GameParameters, mixed, number};
use crate::{
    Action, BoxFuture, Demonstration, Environment, EnvironmentError, EnvironmentFactory, EnvironmentLimits,
    EnvironmentSpec, EnvironmentSpecError, Observation,
};

/// Name of the environment.
const NAME: &str = "guess_number";
/// Counts guesses that are no number of the range.
const BAD_ACTIONS: &str = "bad_actions";

/// The right guess is worth 1, every other one `-cost`, so that the return falls with the number of guesses.
#[derive(Clone, Debug, PartialEq)]
pub struct GuessNumber {
    limits: EnvironmentLimits,
    max: u64,
    cost: f64,
}

impl GuessNumber {
    /// The game of a recipe; its `parameters` are `max`, the largest number, 31 by default, and `cost`, 0.1 by default.
    ///
    /// # Errors
    /// Other parameters, and values out of range.
    pub fn new(spec: &EnvironmentSpec) -> Result<Self, EnvironmentSpecError> {
        let parameters = GameParameters::new(&spec.parameters, &["max", "cost"])?;
        let (max, cost) = (parameters.whole("max", 2, 1_000_000, 31)?, parameters.real("cost", 0.1)?);
        Ok(Self { limits: spec.limits(), max, cost })
    }
}

impl EnvironmentFactory for GuessNumber {
    fn name(&self) -> &str {
        NAME
    }

    fn limits(&self) -> EnvironmentLimits {
        self.limits
    }

    fn about(&self) -> Option<String> {
        let Self { max, cost, limits } = self;
        let turns = limits.max_turns;
        Some(format!(
            "`{NAME}`: numbers from 1 to {max}, at most {turns} guesses; a wrong one is worth -{cost}"
        ))
    }

    fn counts(&self) -> &'static [&'static str] {
        &[BAD_ACTIONS]
    }

    fn create(&self) -> Box<dyn Environment> {
        Box::new(Guessing { max: self.max, cost: self.cost, number: 1, low: 1, high: self.max })
    }
}

/// One episode.
#[derive(Debug)]
struct Guessing {
    max: u64,
    cost: f64,
    number: u64,
    /// What the answers so far leave possible.
    low: u64,
    high: u64,
}

impl Guessing {
    /// `word`, and what is still possible.
    fn range(&self, word: &str) -> String {
        let Self { low, high, .. } = self;
        format!("{word}: {low} to {high}")
    }

    fn answer(&mut self, text: &str) -> Observation {
        let mut observation = Observation { reward: Some(-self.cost), ..Observation::default() };
        let said = match number(text).filter(|guess| (1..=self.max).contains(guess)) {
            Some(guess) if guess == self.number => {
                return Observation { reward: Some(1.0), done: true, ..observation };
            }
            Some(guess) if guess < self.number => {
                self.low = self.low.max(guess + 1);
                self.range("higher")
            }
            Some(guess) => {
                self.high = self.high.min(guess - 1);
                self.range("lower")
            }
            None => {
                observation.count(BAD_ACTIONS);
                format!("not a number from 1 to {}", self.max)
            }
        };
        observation.messages.push(Message::new("user", said));
        observation
    }
}

impl Environment for Guessing {
    fn reset<'a>(&'a mut self, task: &'a Task) -> BoxFuture<'a, Result<Vec<Message>, EnvironmentError>> {
        self.number = 1 + mixed(task.id.0) % self.max;
        let rules = Message::new("user", format!("Guess a number from 1 to {}.", self.max));
        Box::pin(std::future::ready(Ok(vec![rules])))
    }

    fn step<'a>(&'a mut self, action: Action<'a>) -> BoxFuture<'a, Result<Observation, EnvironmentError>> {
        let answer = self.answer(action.text);
        Box::pin(std::future::ready(Ok(answer)))
    }

    /// A right player draws from what is still possible, a wrong one from all numbers.
    fn scripted(&self, player: Demonstration, draw: u64) -> Option<String> {
        let (low, high) = match player {
            Demonstration::Right => (self.low, self.high),
            Demonstration::Wrong => (1, self.max),
        };
        Some((low + draw % (high - low + 1)).to_string())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Whatever is guessed, the number stays possible, and a player who goes by the answers finds it.
        #[test]
        fn answers_are_true_and_lead_to_the_number(max in 2..1000u64, hidden: u64, draws: [u64; 1100]) {
            let mut game = Guessing { max, cost: 0.1, number: 1 + hidden % max, low: 1, high: max };
            for draw in draws {
                let guess = game.scripted(Demonstration::Right, draw).unwrap();
                let observation = game.answer(&guess);
                prop_assert!(game.low <= game.number && game.number <= game.high);
                if observation.done {
                    prop_assert_eq!((guess.parse::<u64>().unwrap(), observation.reward), (game.number, Some(1.0)));
                    return Ok(());
                }
                prop_assert_eq!(observation.reward, Some(-0.1));
            }
            prop_assert!(false, "a range of {max} numbers lasts for {max} guesses at most");
        }
    }

    #[test]
    fn what_is_no_guess_is_said_and_counted() {
        let mut game = Guessing { max: 31, cost: 0.1, number: 5, low: 1, high: 31 };
        for text in ["", "high", "0", "32", "99999999999999999999"] {
            let observation = game.answer(text);
            assert_eq!(observation.messages[0].content, "not a number from 1 to 31");
            assert_eq!((observation.counts[BAD_ACTIONS], observation.reward), (1, Some(-0.1)));
        }
        assert_eq!((game.low, game.high), (1, 31));
        let said = |observation: Observation| observation.messages[0].content.clone();
        assert_eq!(said(game.answer("3")), "higher: 4 to 31");
        assert_eq!(said(game.answer("20")), "lower: 4 to 19");
        assert_eq!(said(game.answer("25")), "lower: 4 to 19");
    }
}
