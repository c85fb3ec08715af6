//! Episodes of many turns and of several roles on a tiny random model: their streams, rewards, and what is computed for them.

use std::sync::Arc;

use environments::{
    Action, BoxFuture, Environment, EnvironmentError, EnvironmentFactory, EnvironmentLimits, Observation,
};
use model::{ModelDirectory, Sampling};
use rollout::{
    ENVIRONMENT_COLUMN, Engine, EngineConfig, EngineCounts, Episode, EpisodeConfig, EpisodeEnd,
    EpisodeEnvironment, LocalSampler, RolloutError, Sampler,
};
use trajectory::{Message, Task};

use crate::episodes::{STOPS, TRUNCATED, chatting_of, play_with, played_in, question, recomputed, said};
use crate::{CONFIG, Model};

pub(crate) const TOKENS: usize = 768;
pub(crate) const LONG: EngineConfig = EngineConfig {
    max_prompt_length: TOKENS,
    max_completion_length: 24,
    max_episode_length: TOKENS,
    kv_cache_tokens: Some(32 * TOKENS),
    ..CONFIG
};

/// `roles` speak by turns, until `turns` are over. Each turn is worth 1 to its role, and its number to the next role.
#[derive(Clone, Debug)]
pub(crate) struct ByTurns {
    roles: Vec<String>,
    turns: usize,
}

impl ByTurns {
    pub(crate) fn new(roles: &[&str], turns: usize) -> Self {
        Self { roles: roles.iter().map(ToString::to_string).collect(), turns }
    }
}

impl EnvironmentFactory for ByTurns {
    fn name(&self) -> &str {
        "by_turns"
    }

    fn limits(&self) -> EnvironmentLimits {
        EnvironmentLimits { max_turns: 16, ..EnvironmentLimits::default() }
    }

    fn roles(&self) -> &[String] {
        &self.roles
    }

    fn create(&self) -> Box<dyn Environment> {
        Box::new(self.clone())
    }
}

impl Environment for ByTurns {
    fn reset<'a>(&'a mut self, _: &'a Task) -> BoxFuture<'a, Result<Vec<Message>, EnvironmentError>> {
        Box::pin(std::future::ready(Ok(vec![said("begin")])))
    }

    fn step<'a>(&'a mut self, action: Action<'a>) -> BoxFuture<'a, Result<Observation, EnvironmentError>> {
        let roles = self.roles.len().max(1);
        assert_eq!(action.role, action.turn % roles);
        let next_role = (action.role + 1) % roles;
        let others = (roles > 1).then_some((next_role, action.turn as f64));
        Box::pin(std::future::ready(Ok(Observation {
            next_role,
            messages: vec![said(&format!("t{}", action.turn))],
            reward: Some(1.0),
            other_rewards: others.into_iter().collect(),
            done: action.turn + 1 == self.turns,
            ..Observation::default()
        })))
    }
}

/// Episodes of `factory` on `engine` for `tasks` tasks with three sequences each, and what the engine did.
pub(crate) fn played(
    engine: Engine,
    directory: &Arc<ModelDirectory>,
    tasks: u64,
    factory: ByTurns,
    discount: f64,
    sampling: Sampling,
) -> (Vec<Episode>, EngineCounts) {
    played_as(engine, directory, tasks, Arc::new(factory), discount, sampling)
}

/// The same in any environments.
pub(crate) fn played_as(
    engine: Engine,
    directory: &Arc<ModelDirectory>,
    tasks: u64,
    factory: Arc<dyn EnvironmentFactory>,
    discount: f64,
    sampling: Sampling,
) -> (Vec<Episode>, EngineCounts) {
    let config = played_in(directory, factory);
    let environment = EpisodeEnvironment { discount, ..config.environment };
    let tasks: Vec<_> = (0..tasks).map(question).collect();
    let mut sampler = LocalSampler::fixed(engine);
    let episodes =
        play_with(&mut sampler, directory, EpisodeConfig::of(environment, TOKENS), &tasks, sampling);
    (episodes, sampler.counts())
}

/// The log-probabilities of eight turns equal those of one pass of the trainer, bit for bit, and no turn computes what a turn
/// before it has computed.
#[test]
fn eight_turns_have_the_bits_of_one_pass_and_a_turn_costs_what_is_new() {
    let (model, directory) = chatting_of(Model::with_context(TOKENS));
    let decoder = model.decoder(&model.parameters());
    for sampling in [Sampling::PLAIN, TRUNCATED] {
        let (episodes, counts) =
            played(model.engine(LONG, &STOPS), &directory, 4, ByTurns::new(&[], 8), 1.0, sampling);
        assert_eq!(episodes.len(), 12);
        let mut whole = 0;
        let mut computed: usize = 0;
        for episode in &episodes {
            recomputed(&decoder, &episode.sample().unwrap());
            whole += usize::from(episode.end == EpisodeEnd::Done);
            assert!(episode.end != EpisodeEnd::Done || episode.turns.len() == 8);
            let turns = episode.turns.windows(2);
            computed += turns.map(|two| two[1].completion.start - (two[0].completion.end - 1)).sum::<usize>();
        }
        assert!(whole > 3, "{whole} episodes have eight turns");
        let first: usize = episodes.iter().step_by(3).map(|episode| episode.prompt_length).sum();
        assert_eq!((counts.prefilled_tokens as usize, counts.evicted_tokens), (first + computed, 0));
    }
}

/// Every role has a stream of its own, which nothing of the other role is in but what the environment says.
#[test]
fn roles_have_streams_and_rewards_of_their_own() {
    let (model, directory) = chatting_of(Model::with_context(TOKENS));
    let decoder = model.decoder(&model.parameters());
    let factory = ByTurns::new(&["asker", "solver"], 6);
    let (episodes, _) = played(model.engine(LONG, &STOPS), &directory, 4, factory, 0.5, Sampling::PLAIN);
    assert_eq!(episodes.len(), 24, "two roles of 12 episodes");
    let mut whole = 0;
    for group in episodes.chunks(6) {
        for (n, episode) in group.iter().enumerate() {
            assert_eq!(
                (episode.index, episode.role.as_deref()),
                (n as u32, Some(["asker", "solver"][n / 3]))
            );
            if episode.turns.is_empty() {
                assert!(episode.sample().unwrap().loss_mask().iter().all(|trained| !trained));
                continue;
            }
            recomputed(&decoder, &episode.sample().unwrap());
        }
        for (asker, solver) in group[..3].iter().zip(&group[3..]) {
            assert_eq!((&asker.end, &asker.counts), (&solver.end, &solver.counts));
            if asker.end != EpisodeEnd::Done {
                continue;
            }
            whole += 1;
            let rewards = |episode: &Episode| -> Vec<f64> {
                episode.turns.iter().map(|turn| turn.reward.unwrap()).collect()
            };
            // Turn t is worth 1 to its role and t to the last turn of the other role, discounted by 0.5^t.
            let of = |turn: i32| 0.5_f64.powi(turn);
            let given = |turn: i32| f64::from(turn + 1) * of(turn + 1);
            let turns = |turns: [i32; 3]| turns.map(|t| of(t) + if t < 5 { given(t) } else { 0.0 });
            assert_eq!(rewards(asker), turns([0, 2, 4]));
            assert_eq!(rewards(solver), turns([1, 3, 5]));
            let text = |episode: &Episode| directory.tokenizer().decode_special(episode.token_ids()).unwrap();
            let (asked, solved) = (text(asker), text(solver));
            assert!(
                asked.contains("[user]begin") && asked.contains("[user]t1") && asked.contains("[user]t3")
            );
            assert!(solved.contains("[user]t0") && !solved.contains("begin") && !solved.contains("t1"));
        }
    }
    assert!(whole > 3, "{whole} episodes have six turns");
}

/// A task names the environment that it is played in; one that there is not is an error, not another environment.
#[test]
fn a_task_names_its_environment() {
    let (model, directory) = chatting_of(Model::with_context(TOKENS));
    let two = played_in(&directory, Arc::new(ByTurns::new(&[], 2)));
    let one = played_in(&directory, Arc::new(ByTurns::new(&[], 1))).environment;
    let config = EpisodeConfig { named: [("one".to_owned(), one)].into(), ..two };
    let task = |id: u64, name: Option<&str>| {
        let mut task = Task::clone(&question(id));
        task.columns.extend(name.map(|name| (ENVIRONMENT_COLUMN.to_owned(), name.into())));
        Arc::new(task)
    };
    let mut sampler = LocalSampler::fixed(model.engine(LONG, &STOPS));
    let tasks = [task(0, None), task(1, Some("one"))];
    let episodes = play_with(&mut sampler, &directory, config.clone(), &tasks, Sampling::PLAIN);
    let turns = |group: u64| episodes.iter().filter(move |episode| episode.group.0 == group);
    assert!(turns(0).any(|episode| episode.turns.len() == 2));
    assert!(turns(1).all(|episode| episode.turns.len() == 1));
    let error = config.of_task(&task(7, Some("three"))).unwrap_err();
    assert!(matches!(error, RolloutError::NoEnvironment { .. }), "{error:?}");
    assert_eq!(error.to_string(), "the column `environment` of task 7 is \"three\"; the recipe names `one`");
}
