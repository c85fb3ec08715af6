//! `tic_tac_toe`: the policy plays both sides, or one side against a player of the environment.
//!
//! Invariant: every message shows the whole board, so a move depends on nothing before it.

use std::sync::LazyLock;

use trajectory::{Message, Task};

use super::{GameParameters, mixed, number};
use crate::{
    Action, BoxFuture, Demonstration, Environment, EnvironmentError, EnvironmentFactory, EnvironmentLimits,
    EnvironmentSpec, EnvironmentSpecError, Observation,
};

/// Name of the environment.
const NAME: &str = "tic_tac_toe";
/// The two sides, which are the roles of self-play. The first one begins.
const MARKS: [char; 2] = ['x', 'o'];
const FIELDS: usize = 9;
const LINES: [[usize; 3]; 8] =
    [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 3, 6], [1, 4, 7], [2, 5, 8], [0, 4, 8], [2, 4, 6]];

/// Ends of a game, as counts: of the side that the policy plays, or of `x` in self-play.
const WON: &str = "won";
const DRAWN: &str = "drawn";
const LOST: &str = "lost";
/// Games that end because the policy named no free field.
const ILLEGAL: &str = "illegal";

/// Who plays against the policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opponent {
    /// The policy itself, in a role of its own.
    Itself,
    /// A player who draws among the free fields.
    Random,
    /// A player who reaches the most that the position allows, and draws among the best fields.
    Perfect,
}

/// The winner gets 1, the loser -1, both get 0 for a draw. Who names no free field loses; the other side then gets 0.
#[derive(Clone, Debug)]
pub struct TicTacToe {
    limits: EnvironmentLimits,
    opponent: Opponent,
    opening_moves: u64,
    roles: Vec<String>,
}

impl TicTacToe {
    /// Its kind in a recipe.
    pub const KIND: &str = NAME;

    /// The game of a recipe; its `parameters` are `opponent` (`self`, `random`, `perfect`), and `opening_moves`: most moves
    /// that are drawn before the game begins, by the id of the task, 0 by default. Against an opponent the policy begins in
    /// every other task.
    ///
    /// # Errors
    /// Other parameters, and values out of range.
    pub fn new(spec: &EnvironmentSpec) -> Result<Self, EnvironmentSpecError> {
        let parameters = GameParameters::new(&spec.parameters, &["opponent", "opening_moves"])?;
        let opponents = [Opponent::Itself, Opponent::Random, Opponent::Perfect];
        let opponent = opponents[parameters.choice("opponent", &["self", "random", "perfect"])?];
        let roles = MARKS.iter().filter(|_| opponent == Opponent::Itself).map(char::to_string).collect();
        let opening_moves = parameters.whole("opening_moves", 0, 4, 0)?;
        Ok(Self { limits: spec.limits(), opponent, opening_moves, roles })
    }
}

impl EnvironmentFactory for TicTacToe {
    fn name(&self) -> &str {
        NAME
    }

    fn limits(&self) -> EnvironmentLimits {
        self.limits
    }

    fn about(&self) -> Option<String> {
        let opponent = match self.opponent {
            Opponent::Itself => "the policy plays both sides, as roles `x` and `o`",
            Opponent::Random => "against a random player",
            Opponent::Perfect => "against a perfect player",
        };
        Some(format!("`{NAME}`: {opponent}; up to {} moves before the game", self.opening_moves))
    }

    fn counts(&self) -> &'static [&'static str] {
        &[WON, DRAWN, LOST, ILLEGAL]
    }

    fn roles(&self) -> &[String] {
        &self.roles
    }

    fn create(&self) -> Box<dyn Environment> {
        let Self { opponent, opening_moves, .. } = *self;
        Box::new(Game { opponent, opening_moves, board: Board::default(), side: 0, draws: 0 })
    }
}

/// [`Board::value`] of every position that a game can reach.
static VALUES: LazyLock<Vec<Option<i8>>> = LazyLock::new(|| {
    let mut known = vec![None; 3_usize.pow(FIELDS as u32)];
    Board::default().value(&mut known);
    known
});

/// `None` where a field is free, else the side that has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Board([Option<usize>; FIELDS]);

impl Board {
    fn free(&self) -> Vec<usize> {
        (0..FIELDS).filter(|field| self.0[*field].is_none()).collect()
    }

    fn with(mut self, field: usize, side: usize) -> Self {
        self.0[field] = Some(side);
        self
    }

    fn won_by(&self, side: usize) -> bool {
        LINES.iter().any(|line| line.iter().all(|field| self.0[*field] == Some(side)))
    }

    /// The side that moves next: both have as many moves, or `x` one more.
    fn next(&self) -> usize {
        (FIELDS - self.free().len()) % 2
    }

    /// Its place in [`VALUES`].
    fn place(&self) -> usize {
        self.0.iter().fold(0, |place, side| 3 * place + side.map_or(0, |side| side + 1))
    }

    /// What the side that moves next can reach: 1, 0 or -1. `known` are the values by place.
    fn value(&self, known: &mut [Option<i8>]) -> i8 {
        if let Some(value) = known[self.place()] {
            return value;
        }
        let side = self.next();
        let after = self.free().into_iter().map(|field| -self.with(field, side).value(known));
        let value = if self.won_by(1 - side) { -1 } else { after.max().unwrap_or(0) };
        known[self.place()] = Some(value);
        value
    }

    /// The free fields from which the side that moves next reaches most.
    fn best(&self) -> Vec<usize> {
        let side = self.next();
        let value = |field: usize| -VALUES[self.with(field, side).place()].unwrap_or(0);
        let values: Vec<(usize, i8)> = self.free().into_iter().map(|field| (field, value(field))).collect();
        let most = values.iter().map(|(_, value)| *value).max();
        values.into_iter().filter(|(_, value)| Some(*value) == most).map(|(field, _)| field).collect()
    }
}

/// Three rows, a free field with its number: `x2o/4x6/789`.
impl std::fmt::Display for Board {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (field, side) in self.0.iter().enumerate() {
            let row = if field > 0 && field % 3 == 0 { "/" } else { "" };
            match side {
                Some(side) => write!(f, "{row}{}", MARKS[*side])?,
                None => write!(f, "{row}{}", field + 1)?,
            }
        }
        Ok(())
    }
}

/// One episode.
#[derive(Debug)]
struct Game {
    opponent: Opponent,
    opening_moves: u64,
    board: Board,
    /// The side that the policy plays against an opponent.
    side: usize,
    /// Seed of what is drawn next.
    draws: u64,
}

impl Game {
    fn drawn(&mut self, from: &[usize]) -> Option<usize> {
        self.draws = mixed(self.draws);
        from.get((self.draws % from.len().max(1) as u64) as usize).copied()
    }

    /// The opponent moves, if it is its turn.
    fn opponent_moves(&mut self) {
        let side = self.board.next();
        let from = match self.opponent {
            Opponent::Random if side != self.side => self.board.free(),
            Opponent::Perfect if side != self.side => self.board.best(),
            _ => return,
        };
        if let Some(field) = self.drawn(&from) {
            self.board = self.board.with(field, side);
        }
    }

    fn begin(&mut self, task: u64) -> Vec<Message> {
        self.draws = mixed(task);
        // As many moves of both sides, so that `x` begins.
        let moves = 2 * (self.draws % (self.opening_moves / 2 + 1));
        for _ in 0..moves {
            let (from, side) = (self.board.free(), self.board.next());
            if let Some(field) = self.drawn(&from) {
                self.board = self.board.with(field, side);
            }
        }
        if self.opponent != Opponent::Itself {
            self.side = (task % 2) as usize;
            self.opponent_moves();
        }
        vec![self.rules()]
    }

    fn rules(&self) -> Message {
        let mark = MARKS[self.board.next()];
        let board = self.board;
        Message::new("user", format!("Tic-tac-toe. You are {mark}. Name a free field.\n{board}"))
    }

    fn play(&mut self, Action { turn, role, text, .. }: Action<'_>) -> Observation {
        let mut observation = Observation { done: true, reward: Some(-1.0), ..Observation::default() };
        let side = self.board.next();
        let named = number(text).and_then(|field| usize::try_from(field).ok()?.checked_sub(1));
        let Some(field) = named.filter(|field| self.board.0.get(*field) == Some(&None)) else {
            observation.count(ILLEGAL);
            return observation;
        };
        self.board = self.board.with(field, side);
        let itself = self.opponent == Opponent::Itself;
        if !itself && !self.board.won_by(side) {
            self.opponent_moves();
        }
        let (won, lost) = (self.board.won_by(side), self.board.won_by(1 - side));
        if won || lost || self.board.free().is_empty() {
            let reward = f64::from(i8::from(won) - i8::from(lost));
            // Of `x` in self-play.
            let (won, lost) = if itself && side == 1 { (lost, won) } else { (won, lost) };
            observation.count(if won {
                WON
            } else if lost {
                LOST
            } else {
                DRAWN
            });
            let other_rewards = if itself { vec![(1 - role, -reward)] } else { Vec::new() };
            return Observation { reward: Some(reward), other_rewards, ..observation };
        }
        // What a role reads first has the rules.
        let message =
            if itself && turn == 0 { self.rules() } else { Message::new("user", self.board.to_string()) };
        Observation {
            done: false,
            reward: Some(0.0),
            next_role: if itself { 1 - role } else { 0 },
            messages: vec![message],
            ..observation
        }
    }
}

impl Environment for Game {
    fn reset<'a>(&'a mut self, task: &'a Task) -> BoxFuture<'a, Result<Vec<Message>, EnvironmentError>> {
        let opening = self.begin(task.id.0);
        Box::pin(std::future::ready(Ok(opening)))
    }

    fn step<'a>(&'a mut self, action: Action<'a>) -> BoxFuture<'a, Result<Observation, EnvironmentError>> {
        let observation = self.play(action);
        Box::pin(std::future::ready(Ok(observation)))
    }

    /// A right player draws among the best fields, a wrong one among all that are free.
    fn scripted(&self, player: Demonstration, draw: u64) -> Option<String> {
        let fields = match player {
            Demonstration::Right => self.board.best(),
            Demonstration::Wrong => self.board.free(),
        };
        Some((1 + fields.get((draw % fields.len().max(1) as u64) as usize)?).to_string())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;
    use trajectory::StopReason;

    use super::*;

    fn game(opponent: Opponent) -> Game {
        Game { opponent, opening_moves: 4, board: Board::default(), side: 0, draws: 0 }
    }

    fn action(turn: usize, role: usize, text: &str) -> Action<'_> {
        Action { turn, role, text, stop: StopReason::StopToken, last: false }
    }

    #[test]
    fn a_game_against_itself_alternates_and_rewards_both_sides() {
        let mut game = Game { opening_moves: 0, ..game(Opponent::Itself) };
        let opening = &game.begin(7)[0].content;
        assert_eq!(opening, "Tic-tac-toe. You are x. Name a free field.\n123/456/789");
        for (turn, (field, board)) in
            [("5", "123/4x6/789"), ("1", "o23/4x6/789"), ("3", "o2x/4x6/789"), ("9", "o2x/4x6/78o")]
                .into_iter()
                .enumerate()
        {
            let observation = game.play(action(turn, turn % 2, field));
            assert!(!observation.done && observation.messages[0].content.ends_with(board), "{observation:?}");
            assert_eq!((observation.next_role, observation.reward), (1 - turn % 2, Some(0.0)));
            assert_eq!(observation.messages[0].content.contains("You are o"), turn == 0);
        }
        let end = game.play(action(4, 0, "7"));
        assert!(end.done);
        assert_eq!((end.reward, &end.other_rewards[..], end.counts[WON]), (Some(1.0), &[(1, -1.0)][..], 1));
    }

    #[test]
    fn a_field_that_is_not_free_loses() {
        for text in ["", "x", "0", "10", "1", "18446744073709551616"] {
            let mut game = game(Opponent::Itself);
            game.board = Board::default().with(0, 0);
            let end = game.play(action(1, 1, text));
            assert_eq!((end.done, end.reward, end.counts[ILLEGAL]), (true, Some(-1.0), 1), "{text:?}");
            assert!(end.other_rewards.is_empty());
        }
    }

    /// How 120 games of a scripted policy end.
    fn ends(opponent: Opponent, opening_moves: u64, player: Demonstration) -> BTreeMap<&'static str, u32> {
        let mut ends = BTreeMap::new();
        for task in 0..120 {
            let mut game = Game { opening_moves, ..game(opponent) };
            game.begin(task);
            for turn in 0..=FIELDS {
                assert_eq!(game.board.next(), game.side, "the side of the policy is x in every other task");
                let field = game.scripted(player, mixed(task * 100 + turn as u64)).unwrap();
                let observation = game.play(action(turn, 0, &field));
                assert!(observation.other_rewards.is_empty() && observation.next_role == 0);
                if observation.done {
                    *ends.entry(observation.counts.into_keys().next().unwrap()).or_insert(0) += 1;
                    break;
                }
            }
        }
        assert_eq!(ends.values().sum::<u32>(), 120, "every game ends within nine moves: {ends:?}");
        ends
    }

    #[test]
    fn opponents_play_by_the_rules_and_from_the_beginning_perfect_players_lose_no_game() {
        let random = ends(Opponent::Random, 4, Demonstration::Wrong);
        assert!(random[WON] > 20 && random[LOST] > 20, "{random:?}");
        let perfect = ends(Opponent::Perfect, 0, Demonstration::Wrong);
        assert!(perfect[LOST] > 60 && !perfect.contains_key(WON), "{perfect:?}");
        assert!(!ends(Opponent::Random, 0, Demonstration::Right).contains_key(LOST));
        assert_eq!(ends(Opponent::Perfect, 0, Demonstration::Right)[DRAWN], 120);
    }

    #[test]
    fn parameters_choose_the_opponent() {
        let made = |parameters: serde_json::Value| {
            let parameters = parameters.as_object().unwrap().clone();
            TicTacToe::new(&EnvironmentSpec { parameters, ..EnvironmentSpec::default() })
        };
        assert_eq!(made(json!({})).unwrap().roles(), ["x", "o"]);
        assert!(made(json!({"opponent": "perfect"})).unwrap().roles().is_empty());
        let error = made(json!({"opponent": "me"})).unwrap_err().to_string();
        assert_eq!(error, "`parameters.opponent` is \"me\"; there are self, random, perfect");
    }
}
