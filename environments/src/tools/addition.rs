//! What a scripted player says to a generated addition: a call of the calculator, or a sum in the head.
//!
//! Invariant: a sum in the head has no carry, so it is right exactly where there is none.

use serde_json::{Map, Value};
use trajectory::Task;

use crate::ToolCall;

/// The operands of a generated addition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Addition {
    a: u64,
    b: u64,
}

impl Addition {
    /// The columns `a` and `b` of a task; `None` of another task.
    pub(super) fn of(task: &Task) -> Option<Self> {
        let operand = |name: &str| task.columns.get(name)?.as_u64();
        Some(Self { a: operand("a")?, b: operand("b")? })
    }

    /// The call of `calculator` that adds.
    pub(super) fn call(self, calculator: &str) -> ToolCall {
        let expression = Value::from(format!("{}+{}", self.a, self.b));
        let arguments = Map::from_iter([("expression".to_owned(), expression)]);
        ToolCall { name: calculator.to_owned(), arguments, id: None }
    }

    /// The sum of every column by itself.
    pub(super) fn without_carry(self) -> u64 {
        let (mut a, mut b, mut place, mut sum) = (self.a, self.b, 1_u64, 0_u64);
        while a > 0 || b > 0 {
            sum = sum.saturating_add(((a % 10 + b % 10) % 10).saturating_mul(place));
            (a, b, place) = (a / 10, b / 10, place.saturating_mul(10));
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sum_in_the_head_drops_every_carry() {
        for (a, b, sum) in [(37, 48, 75), (31, 48, 79), (55, 67, 12), (0, 0, 0), (999, 1, 990)] {
            assert_eq!(Addition { a, b }.without_carry(), sum, "{a} + {b}");
        }
    }
}
