//! Tests of sessions as a whole: a toy model whose tokens are letters, agents that append, rewrite and ask again.

use std::convert::Infallible;
use std::time::Duration;

use proptest::prelude::*;
use serde_json::{Value, json};
use tokio::time::Instant;
use trajectory::{Message, PolicyVersion, StopReason, TokenExperts, VersionRun};

use super::*;

/// Ends a message.
const END: u32 = 1;
/// Added to the token of a letter that the policy sampled in another way than the tokenizer writes it.
const OTHER: u32 = 1000;

/// Renders messages as a role, letters and an end.
struct Letters<'a>(&'a [SessionMessage]);

fn letters(message: &Message) -> Vec<u32> {
    let role = match message.role.as_str() {
        "system" => 2,
        "user" => 3,
        "tool" => 4,
        _ => 5,
    };
    let mut tokens = vec![role];
    tokens.extend(message.content.chars().map(|letter| letter as u32));
    tokens.push(END);
    tokens
}

impl PromptRenderer for Letters<'_> {
    type Error = Infallible;

    fn whole(&self) -> Result<Vec<u32>, Infallible> {
        let mut tokens: Vec<u32> = self.0.iter().flat_map(|message| letters(&message.plain())).collect();
        tokens.push(5);
        Ok(tokens)
    }

    fn following(&self, last_token: u32, messages: &[Message]) -> Result<Vec<u32>, Infallible> {
        let mut tokens = if last_token == END { vec![] } else { vec![END] };
        tokens.extend(messages.iter().flat_map(letters));
        tokens.push(5);
        Ok(tokens)
    }
}

/// The answer `text`, sampled by `version`; `other` spells it as the tokenizer does not, `cut` leaves out its end.
fn response(n: usize, text: &str, version: u64, other: bool, cut: bool) -> SessionResponse {
    let mut sampled_ids: Vec<u32> =
        text.chars().map(|letter| letter as u32 + if other { OTHER } else { 0 }).collect();
    if !cut {
        sampled_ids.push(END);
    }
    let tokens = sampled_ids.len();
    SessionResponse {
        id: format!("chatcmpl-{n}"),
        message: SessionMessage::new("assistant", text),
        logprobs: (0..tokens).map(|t| -1.0 - t as f32 - 0.01 * n as f32).collect(),
        versions: vec![VersionRun { version: PolicyVersion(version), len: tokens as u32 }],
        prompt_version: PolicyVersion(version),
        experts: None,
        temperature: 1.0,
        stop: if cut { StopReason::Length } else { StopReason::StopToken },
        text: text.to_owned(),
        sampled_ids,
    }
}

fn request(messages: &[SessionMessage]) -> SessionRequest {
    SessionRequest { tools: Value::Null, messages: messages.to_vec(), requested: Value::Null }
}

fn user(text: &str) -> SessionMessage {
    SessionMessage::new("user", text)
}

fn assistant(text: &str) -> SessionMessage {
    SessionMessage::new("assistant", text)
}

/// A session to which `ask` puts requests.
struct AskedSession {
    store: SessionStore,
    started: StartedSession,
    asked: usize,
}

impl AskedSession {
    fn new() -> Self {
        let store = SessionStore::new(SessionLimits::default());
        let started = store.start(SessionStart::default(), Instant::now()).unwrap();
        Self { store, started, asked: 0 }
    }

    fn ask(
        &mut self,
        request: &SessionRequest,
        of: impl FnOnce(usize) -> Vec<SessionResponse>,
    ) -> NextPrompt {
        let now = Instant::now();
        let call = self.store.call(&self.started.api_key, now).unwrap();
        let prompt = call.next_prompt(request, &Letters(&request.messages)).unwrap();
        let responses = of(self.asked);
        self.asked += responses.len();
        assert!(call.record(request, &prompt, responses, now));
        prompt
    }

    fn say(&mut self, messages: &[SessionMessage], text: &str) -> NextPrompt {
        self.ask(&request(messages), |n| vec![response(n, text, n as u64, true, false)])
    }

    fn take(self) -> AgentSession {
        self.store.take(&self.started.session_id).unwrap()
    }
}

#[test]
fn tokens_of_a_row_have_the_experts_of_the_call_that_read_them_first() {
    let asked = AskedSession::new();
    let mut messages = vec![user("a")];
    let mut lengths = Vec::new();
    for n in 0..2_u16 {
        let (now, request) = (Instant::now(), request(&messages));
        let call = asked.store.call(&asked.started.api_key, now).unwrap();
        let prompt = call.next_prompt(&request, &Letters(&request.messages)).unwrap();
        let mut response = response(usize::from(n), "b", 0, true, false);
        let tokens = prompt.token_ids.len() + response.sampled_ids.len();
        response.experts = Some(TokenExperts { per_token: 1, ids: vec![n; tokens - 1] });
        assert!(call.record(&request, &prompt, vec![response], now));
        lengths.push(tokens);
        messages.extend([assistant("b"), user("c")]);
    }
    asked.store.with(&asked.started.session_id, |s| s.set_reward(None, 1.0)).unwrap().unwrap();
    let rows = asked.take().rows().unwrap();
    let [row] = &rows[..] else { panic!("{rows:?}") };
    let expected = [vec![0; lengths[0] - 1], vec![1; lengths[1] - lengths[0]]].concat();
    assert_eq!(row.sample.experts(), Some(&TokenExperts { per_token: 1, ids: expected }));
}

#[test]
fn an_agent_that_appends_has_one_row_with_the_sampled_tokens() {
    let mut asked = AskedSession::new();
    let mut messages = vec![SessionMessage::new("system", "be brief"), user("a")];
    for n in 0..4 {
        asked.say(&messages, &format!("answer{n}"));
        messages.extend([assistant(&format!("answer{n}")), user("more")]);
    }
    asked.store.with(&asked.started.session_id, |s| s.set_reward(None, 1.0)).unwrap().unwrap();
    let session = asked.take();
    assert_eq!(session.drift(), DriftCounts { clean: 3, realign: 0, fork: 0 });
    let rows = session.rows().unwrap();
    let [row] = &rows[..] else { panic!("{rows:?}") };
    assert_eq!(row.turns.len(), 4);
    assert_eq!(row.sample.trained_tokens(), 4 * "answer0.".len());
    assert_eq!(row.turns.iter().filter_map(|turn| turn.reward).collect::<Vec<_>>(), [1.0]);
    assert_eq!(row.turns[3].reward, Some(1.0));
    assert_eq!(row.sample.oldest_version(), PolicyVersion(0));
}

#[test]
fn a_completion_without_its_end_gets_one() {
    let mut asked = AskedSession::new();
    asked.ask(&request(&[user("a")]), |n| vec![response(n, "cut", 0, true, true)]);
    let prompt = asked.say(&[user("a"), assistant("cut"), user("b")], "x");
    let cut: Vec<u32> = "cut".chars().map(|letter| letter as u32 + OTHER).collect();
    let expected = [&[3, 97, END, 5][..], &cut, &[END, 3, 98, END, 5]].concat();
    assert_eq!(prompt, NextPrompt { token_ids: expected, continuation: Continuation::Clean(0) });
}

#[test]
fn a_last_response_in_other_words_is_overwritten() {
    for (other, expected) in [(false, Continuation::Realign(1)), (true, Continuation::Fork)] {
        let mut asked = AskedSession::new();
        asked.ask(&request(&[user("a")]), |n| vec![response(n, "first", 0, other, false)]);
        asked.say(&[user("a"), assistant("first"), user("b")], "second ");
        // Where the first answer was sampled as the tokenizer does not write it, its tokens differ as well.
        let trimmed = [user("a"), assistant("first"), user("b"), assistant("second"), user("c")];
        assert_eq!(asked.say(&trimmed, "third").continuation, expected);
        let rows = asked.take().rows().unwrap();
        let trained: Vec<_> = rows.iter().map(|row| row.interactions.clone()).collect();
        let branches: Vec<_> = rows.iter().map(|row| row.branch.clone()).collect();
        match other {
            false => assert_eq!((trained, branches), (vec![vec![0, 2]], vec![vec![0, 1, 2]])),
            true => assert_eq!((trained, branches), (vec![vec![0, 1], vec![2]], vec![vec![0, 1], vec![2]])),
        }
    }
}

#[test]
fn a_long_last_response_in_other_words_is_a_new_branch() {
    let long = "l".repeat(REALIGN_BELOW);
    for (text, expected) in [(&long[1..], Continuation::Realign(0)), (&long[..], Continuation::Fork)] {
        let mut asked = AskedSession::new();
        asked.ask(&request(&[user("a")]), |n| vec![response(n, text, 0, true, true)]);
        let prompt = asked.say(&[user("a"), assistant("summary"), user("b")], "x");
        assert_eq!(prompt.continuation, expected);
    }
}

#[test]
fn a_shared_response_is_trained_on_once() {
    let mut asked = AskedSession::new();
    asked.say(&[user("a")], "plan");
    let before = [user("a"), assistant("plan")];
    asked.say(&[&before[..], &[user("left")]].concat(), "l");
    asked.say(&[&before[..], &[user("right")]].concat(), "r");
    let session = asked.take();
    let rows = session.rows().unwrap();
    assert_eq!(rows.iter().map(|row| row.interactions.clone()).collect::<Vec<_>>(), [vec![0, 1], vec![2]]);
    assert_eq!(rows[1].branch, [0, 2]);
    assert_eq!((rows[0].sample.trained_tokens(), rows[1].sample.trained_tokens()), (5 + 2, 2));
}

#[test]
fn orphans_and_auxiliary_calls_are_not_trained_on() {
    let mut asked = AskedSession::new();
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    let with_tools =
        |messages: &[SessionMessage]| SessionRequest { tools: tools.clone(), ..request(messages) };
    let one = |text: &'static str| move |n| vec![response(n, text, 0, false, false)];
    asked.ask(&with_tools(&[user("a")]), one("lost"));
    asked.ask(&with_tools(&[user("a")]), one("kept"));
    asked.ask(&request(&[user("a title?")]), one("title"));
    asked.ask(&with_tools(&[user("a"), assistant("kept"), user("b")]), |n| {
        vec![response(n, "x", 0, false, false), response(n + 1, "y", 0, false, false)]
    });
    asked.store.with(&asked.started.session_id, |s| s.set_reward(Some("chatcmpl-3"), 2.0)).unwrap().unwrap();
    let session = asked.take();
    use InteractionRole::{Agent, Auxiliary, Discarded};
    assert_eq!(session.roles(), [Discarded, Agent, Auxiliary, Discarded, Agent]);
    let rows = session.rows().unwrap();
    assert_eq!(rows.iter().map(|row| row.interactions.clone()).collect::<Vec<_>>(), [[1, 4]]);
    // The reward of the choice that was not taken stays with the session.
    assert_eq!(rows[0].turns.iter().map(|turn| turn.reward).collect::<Vec<_>>(), [Some(2.0), None]);
    assert_eq!(credit::discounted(session.interactions(), 0.5), [0.25, 0.5, 1.0, 2.0, 0.0]);
    assert_eq!(credit::counts(&session.roles()), [2, 1, 2]);
}

#[test]
fn every_state_of_a_session_has_its_status() {
    let limits = SessionLimits { max_sessions: 2, idle: Duration::from_secs(10), ..SessionLimits::default() };
    let (store, start) = (SessionStore::new(limits), Instant::now());
    let own =
        SessionStart { key: Some("sk-own-key".to_owned()), max_calls: Some(2), ..SessionStart::default() };
    let first = store.start(own.clone(), start).unwrap();
    let second = store.start(SessionStart::default(), start).unwrap();
    let status = |result: Result<SessionCall, SessionError>| result.map(drop).unwrap_err().status();
    assert_eq!(store.start(own.clone(), start).unwrap_err().status(), 429);
    store.take(&second.session_id).unwrap();
    assert_eq!(store.start(own.clone(), start).unwrap_err(), SessionError::KeyActive);
    let bad = SessionStart { key: Some("a b c d e f".to_owned()), ..SessionStart::default() };
    assert_eq!(store.start(bad, start).unwrap_err().status(), 400);
    assert_eq!(status(store.call("sk-wrong", start)), 401);
    assert_eq!(status(store.call(&second.api_key, start)), 410);
    let call = store.call(&first.api_key, start).unwrap();
    assert_eq!(status(store.call(&first.api_key, start)), 409);
    drop(call);
    let other = store.start(SessionStart::default(), start).unwrap();
    let agent = SessionCaller::Agent(first.api_key.clone());
    let refused = |caller: &SessionCaller, id: Option<&str>, interaction: Option<&str>, value: f64| {
        store.set_reward(caller, id, interaction, value).unwrap_err().status()
    };
    assert_eq!(refused(&agent, Some(&other.session_id), None, 1.0), 403);
    assert_eq!(refused(&agent, None, None, 1.0), 404);
    assert_eq!(refused(&agent, None, None, f64::NAN), 400);
    assert_eq!(refused(&SessionCaller::Admin, Some("session-9"), None, 1.0), 404);
    assert_eq!(refused(&SessionCaller::Agent("sk-unknown".to_owned()), None, None, 1.0), 401);
    for n in 0..2 {
        let call = store.call(&first.api_key, start).unwrap();
        let asked = request(&[user("a")]);
        let prompt = call.next_prompt(&asked, &Letters(&asked.messages)).unwrap();
        assert!(call.record(&asked, &prompt, vec![response(n, "x", 0, false, false)], start));
    }
    assert_eq!(status(store.call(&first.api_key, start)), 400);
    assert_eq!(refused(&agent, None, Some("chatcmpl-9"), 1.0), 404);
    store.set_reward(&agent, None, Some("chatcmpl-1"), 1.0).unwrap();
    assert_eq!(store.end(&agent, None).unwrap(), (first.session_id.clone(), 2));
    assert_eq!(refused(&agent, None, None, 1.0), 410);
    assert_eq!(status(store.call(&first.api_key, start)), 410);
    // The other one is used no more, and expires; a call under way keeps a session.
    let kept = store.call(&other.api_key, start).unwrap();
    let late = start + Duration::from_secs(11);
    assert_eq!(store.expire(late), [first.session_id]);
    drop(kept);
    assert_eq!(store.expire(late), [other.session_id]);
    assert_eq!(store.expire(late), Vec::<String>::new());
    let SessionCounts { started, ended, lost, interactions, cancelled, .. } = store.counts();
    assert_eq!((started, ended, lost, interactions, cancelled), (3, 1, 2, 2, 2));
    assert!(store.is_empty());
}

#[test]
fn an_answer_after_the_end_is_not_recorded() {
    let (store, now) = (SessionStore::new(SessionLimits::default()), Instant::now());
    let started = store.start(SessionStart::default(), now).unwrap();
    let call = store.call(&started.api_key, now).unwrap();
    let asked = request(&[user("a")]);
    let prompt = call.next_prompt(&asked, &Letters(&asked.messages)).unwrap();
    let taken = store.take(&started.session_id).unwrap();
    assert!(!call.record(&asked, &prompt, vec![response(0, "late", 0, false, false)], now));
    assert!(taken.interactions().is_empty() && store.is_empty());
    assert_eq!(store.take(&started.session_id).unwrap_err().status(), 404);
}

/// What a random agent does next.
#[derive(Clone, Copy, Debug)]
enum Move {
    /// Goes on with its conversation.
    Append,
    /// Goes on with the conversation that it had before its last move.
    Back,
    /// Asks the same again.
    Retry,
    /// Trims its last answer, and goes on.
    Trim,
    /// Begins anew with a summary.
    Compact,
    /// Changes its first message.
    Rewrite,
}

fn moves() -> impl Strategy<Value = Vec<(Move, bool, bool)>> {
    let kinds = [Move::Append, Move::Back, Move::Retry, Move::Trim, Move::Compact, Move::Rewrite];
    proptest::collection::vec((proptest::sample::select(kinds.to_vec()), any::<bool>(), any::<bool>()), 1..24)
}

proptest! {
    /// Whatever an agent does: every row has exactly the tokens that its turns were sampled after, no interaction is trained
    /// on twice, and no reward is lost.
    #[test]
    fn rows_have_what_was_sampled_and_have_it_once(moves in moves()) {
        let mut asked = AskedSession::new();
        let mut before: Vec<SessionMessage> = vec![user("q0")];
        let mut conversation = before.clone();
        for (n, (kind, other, cut)) in moves.into_iter().enumerate() {
            let last = conversation.clone();
            match kind {
                Move::Append => {}
                Move::Back => conversation = before.clone(),
                Move::Retry => drop(conversation.drain(conversation.len().saturating_sub(2).max(1)..)),
                Move::Trim => if let Some(answer) = conversation.iter_mut().rfind(|m| m.role() == "assistant") {
                    *answer = assistant(&format!("trimmed{n}"));
                },
                Move::Compact => conversation = vec![user(&format!("summary{n}"))],
                Move::Rewrite => conversation[0] = user(&format!("rewritten{n}")),
            }
            before = last;
            let text = format!("answer{}", n % 3);
            let prompt = asked.ask(&request(&conversation), |at| vec![response(at, &text, (at % 4) as u64, other, cut)]);
            if let Some(continued) = prompt.continuation.interaction() {
                prop_assert!(continued < n);
            }
            if n % 2 == 0 {
                asked.store.with(&asked.started.session_id, |s| s.set_reward(None, n as f64)).unwrap().unwrap();
            }
            conversation.extend([assistant(&text), user(&format!("q{}", n % 2))]);
        }
        let session = asked.take();
        let rows = session.rows().unwrap();
        let mut trained = vec![0; session.interactions().len()];
        for row in &rows {
            prop_assert!(row.sample.trained_tokens() > 0);
            prop_assert_eq!(row.turns.len(), row.interactions.len());
            for (turn, n) in row.turns.iter().zip(&row.interactions) {
                trained[*n] += 1;
                let of = &session.interactions()[*n];
                let (range, tokens) = (turn.completion.clone(), row.sample.token_ids());
                prop_assert_eq!(&tokens[..range.start], &of.prompt_ids[..]);
                prop_assert_eq!(&tokens[range.clone()], &of.sampled_ids[..]);
                prop_assert_eq!(&row.sample.behavior_logprobs()[range.clone()], &of.logprobs[..]);
                prop_assert!(row.sample.loss_mask()[range].iter().all(|trained| *trained));
            }
            let of_turns: usize = row.turns.iter().map(|turn| turn.completion.len()).sum();
            prop_assert_eq!(row.sample.trained_tokens(), of_turns);
            let oldest = row.interactions.iter().flat_map(|n| &session.interactions()[*n].versions);
            prop_assert!(oldest.map(|run| run.version).min() >= Some(row.sample.oldest_version()));
        }
        prop_assert!(trained.iter().all(|times| *times <= 1), "{trained:?}");
        // What is not trained on was discarded, or overwritten in every conversation that went on from it.
        for (n, role) in session.roles().into_iter().enumerate() {
            let follows = |later: &Interaction| later.continuation == Continuation::Realign(n);
            let overwritten = session.interactions().iter().any(follows);
            prop_assert!(trained[n] == 1 || role == InteractionRole::Discarded || overwritten);
        }
        let posted: f64 = session.interactions().iter().filter_map(|interaction| interaction.reward).sum();
        let placed: f64 = rows.iter().flat_map(|row| &row.turns).filter_map(|turn| turn.reward).sum();
        prop_assert!((posted - placed).abs() < 1e-9);
    }

    /// Sessions whose agents disconnect in any order leave nothing behind, and every answer that arrived is in one row.
    #[test]
    fn lost_agents_leave_nothing(ends in proptest::collection::vec((0..4_u8, 0..4_usize), 1..60)) {
        let limits = SessionLimits { idle: Duration::from_secs(5), ..SessionLimits::default() };
        let (store, start) = (SessionStore::new(limits), Instant::now());
        let mut trained = 0;
        for (how, turns) in &ends {
            let started = store.start(SessionStart::default(), start).unwrap();
            let mut messages = vec![user("a")];
            for n in 0..*turns {
                let asked = request(&messages);
                let call = store.call(&started.api_key, start).unwrap();
                let prompt = call.next_prompt(&asked, &Letters(&messages)).unwrap();
                if *how == 3 && n + 1 == *turns {
                    drop(call);
                    break;
                }
                assert!(call.record(&asked, &prompt, vec![response(n, "x", 0, true, false)], start));
                messages.extend([assistant("x"), user("b")]);
            }
            match how {
                0 => trained += store.take(&started.session_id).unwrap().rows().unwrap().iter().map(|row| row.turns.len()).sum::<usize>(),
                1 => assert!(store.give_up(&started.session_id)),
                _ => {}
            }
        }
        let expected: usize = ends.iter().filter(|(how, _)| *how == 0).map(|(_, turns)| turns).sum();
        prop_assert_eq!(trained, expected);
        store.expire(start + Duration::from_secs(6));
        prop_assert!(store.is_empty());
        let counts = store.counts();
        prop_assert_eq!(counts.lost as usize, ends.iter().filter(|(how, _)| *how != 0).count());
    }
}
