//! Games that need no data and no file: what recipes and tests of several turns and of several roles play.
//!
//! # Layout
//! - `guess_number`: a hidden number, found by its neighbours; a reward per turn
//! - `tic_tac_toe`: two roles, or one against a player of the environment
//!
//! # Invariants
//! - A game is a function of the id of its task and of the completions; it waits for nothing.
//! - Whatever the policy writes is a move or an illegal move, never a failure.

mod guess_number;
mod tic_tac_toe;

use serde_json::{Map, Value};

pub use guess_number::GuessNumber;
pub use tic_tac_toe::{Opponent, TicTacToe};

use crate::EnvironmentSpecError;

/// A number that looks random, of `seed` alone (the finaliser of splitmix64).
fn mixed(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The first whole number in `text`, if it begins with one after white space; further words are ignored.
fn number(text: &str) -> Option<u64> {
    let text = text.trim_start();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    text[..digits].parse().ok()
}

/// Reads the parameters of a game.
struct GameParameters<'a> {
    given: &'a Map<String, Value>,
}

impl<'a> GameParameters<'a> {
    /// # Errors
    /// A parameter that is not in `known`.
    fn new(given: &'a Map<String, Value>, known: &[&str]) -> Result<Self, EnvironmentSpecError> {
        match given.keys().find(|key| !known.contains(&&key[..])) {
            Some(key) => {
                Err(wrong(&format!(".{key}"), format!("is unknown; there are {}", known.join(", "))))
            }
            None => Ok(Self { given }),
        }
    }

    /// A whole number from `least` to `most`, or `default`.
    fn whole(&self, key: &str, least: u64, most: u64, default: u64) -> Result<u64, EnvironmentSpecError> {
        let Some(value) = self.given.get(key) else { return Ok(default) };
        value.as_u64().filter(|value| (least..=most).contains(value)).ok_or_else(|| {
            wrong(&format!(".{key}"), format!("is {value}; it must be a whole number from {least} to {most}"))
        })
    }

    /// A finite number, or `default`.
    fn real(&self, key: &str, default: f64) -> Result<f64, EnvironmentSpecError> {
        let Some(value) = self.given.get(key) else { return Ok(default) };
        let finite = value.as_f64().filter(|value| value.is_finite());
        finite.ok_or_else(|| wrong(&format!(".{key}"), format!("is {value}; it must be a number")))
    }

    /// One of `names` by its place, or the first.
    fn choice(&self, key: &str, names: &[&str]) -> Result<usize, EnvironmentSpecError> {
        let Some(value) = self.given.get(key) else { return Ok(0) };
        let place = value.as_str().and_then(|value| names.iter().position(|name| *name == value));
        place.ok_or_else(|| wrong(&format!(".{key}"), format!("is {value}; there are {}", names.join(", "))))
    }
}

fn wrong(key: &str, reason: String) -> EnvironmentSpecError {
    EnvironmentSpecError::Value { key: format!("parameters{key}"), reason }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_number_is_read_from_the_beginning_alone() {
        for (text, expected) in [
            ("12", Some(12)),
            (" 7 is my guess", Some(7)),
            ("x 7", None),
            ("", None),
            ("-3", None),
            ("99999999999999999999999", None),
        ] {
            assert_eq!(number(text), expected, "{text:?}");
        }
    }

    #[test]
    fn parameters_are_checked() {
        let given = json!({"max": 40, "cost": "much"});
        let given = given.as_object().unwrap();
        assert!(GameParameters::new(given, &["max"]).is_err());
        let parameters = GameParameters::new(given, &["max", "cost"]).unwrap();
        assert_eq!(parameters.whole("max", 2, 50, 9).unwrap(), 40);
        let error = parameters.whole("max", 2, 30, 9).unwrap_err();
        assert_eq!(error.to_string(), "`parameters.max` is 40; it must be a whole number from 2 to 30");
        assert!(parameters.real("cost", 0.1).is_err() && parameters.choice("max", &["a"]).is_err());
        assert_eq!(parameters.real("other", 0.5).unwrap(), 0.5);
    }
}
