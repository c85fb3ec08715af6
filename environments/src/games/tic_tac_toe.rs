//! `tic_tac_toe`: the policy plays both sides, or one side against a player of the environment.
//!
//! Invariant: every message shows the whole board, so a move depends on nothing before it.

use trajectory::{Message, Task};

use super::{Parameters, mixed, number};
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
    /// The game of a recipe; its `parameters` are `opponent` (`self`, `random`, `perfect`), and `opening_moves`: most moves
    /// that are drawn before the game begins, by the id of the task, 0 by default. Against an opponent the policy begins in
    /// every other task.
    ///
    /// # Errors
    /// Other parameters, and values out of range.
    pub fn new(spec: &EnvironmentSpec) -> Result<Self, EnvironmentSpecError> {
        let parameters = Parameters::new(&spec.parameters, &["opponent", "opening_moves"])?;
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

    /// What `side`, which moves next, can reach: 1, 0 or -1.
    fn value(&self, side: usize) -> i8 {
        if self.won_by(1 - side) {
            return -1;
        }
        let mut best = None;
        for field in self.free() {
            let value = -self.with(field, side).value(1 - side);
            best = best.max(Some(value));
            if value == 1 {
                break;
            }
        }
        best.unwrap_or(0)
    }

    /// The fields from which `side` reaches most.
    fn best(&self, side: usize) -> Vec<usize> {
        let values: Vec<(usize, i8)> =
            self.free().into_iter().map(|field| (field, -self.with(field, side).value(1 - side))).collect();
        let most = values.iter().map(|(_, value)| *value).max();
        values.into_iter().filter(|(_, value)| Some(*value) == most).map(|(field, _)| field).collect()
    }
}

/// Three rows, as `x.o/.x./...`.
impl std::fmt::Display for Board {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (field, side) in self.0.iter().enumerate() {
            let mark = side.map_or('.', |side| MARKS[side]);
            write!(f, "{}{mark}", if field > 0 && field % 3 == 0 { "/" } else { "" })?;
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
            Opponent::Perfect if side != self.side => self.board.best(side),
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
        Message::new("user", format!("Tic-tac-toe. Name a free field, 1 to 9. You are {mark}.\n{board}"))
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

    /// A right player draws among the free fields, a wrong one among all.
    fn scripted(&self, player: Demonstration, draw: u64) -> Option<String> {
        let fields = match player {
            Demonstration::Right => self.board.free(),
            Demonstration::Wrong => (0..FIELDS).collect(),
        };
        Some((1 + fields.get((draw % fields.len().max(1) as u64) as usize)?).to_string())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use trajectory::StopReason;

    use super::*;

    fn game(opponent: Opponent) -> Game {
        Game { opponent, opening_moves: 4, board: Board::default(), side: 0, draws: 0 }
    }

    fn action(turn: usize, role: usize, text: &str) -> Action<'_> {
        Action { turn, role, text, stop: StopReason::StopToken }
    }

    #[test]
    fn a_game_against_itself_alternates_and_rewards_both_sides() {
        let mut game = Game { opening_moves: 0, ..game(Opponent::Itself) };
        let opening = &game.begin(7)[0].content;
        assert_eq!(opening, "Tic-tac-toe. Name a free field, 1 to 9. You are x.\n.../.../...");
        for (turn, (field, board)) in
            [("5", ".../.x./..."), ("1", "o../.x./..."), ("3", "o.x/.x./..."), ("9", "o.x/.x./..o")]
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

    /// All games of a scripted policy end within nine moves; a perfect opponent never loses one from the beginning.
    #[test]
    fn opponents_play_by_the_rules() {
        let mut ends = std::collections::BTreeMap::new();
        for opponent in [Opponent::Random, Opponent::Perfect] {
            for task in 0..120 {
                // From a drawn position even a perfect player may lose.
                let opening_moves = if opponent == Opponent::Perfect { 0 } else { 4 };
                let mut game = Game { opening_moves, ..game(opponent) };
                game.begin(task);
                for turn in 0..=FIELDS {
                    assert_eq!(
                        game.board.next(),
                        game.side,
                        "the policy moves, and its side is x in every other task"
                    );
                    let field = game.scripted(Demonstration::Right, mixed(task * 100 + turn as u64)).unwrap();
                    let observation = game.play(action(turn, 0, &field));
                    assert!(observation.other_rewards.is_empty() && observation.next_role == 0);
                    if observation.done {
                        let end = observation.counts.into_keys().next().unwrap();
                        *ends.entry((opponent == Opponent::Perfect, end)).or_insert(0) += 1;
                        break;
                    }
                }
            }
        }
        assert_eq!(ends.values().sum::<i32>(), 240, "{ends:?}");
        assert!(!ends.keys().any(|(perfect, end)| *perfect && *end == WON), "{ends:?}");
        assert!(ends[&(false, WON)] > 20 && ends[&(true, LOST)] > 20, "{ends:?}");
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
