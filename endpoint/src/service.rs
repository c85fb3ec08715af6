//! What all routes call: keys, bodies, prompts, requests to the sampler.
//!
//! Invariant: a request is checked whole before the sampler has it: its model, its tokens, its length.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use axum::http::HeaderMap;
use model::ModelDirectory;
use rollout::{RequestHandle, SampleRequest};
use trajectory::GroupId;

use crate::ApiError;
use crate::answer::{AnswerParts, RunningAnswer};
use crate::auth::{AccessKeys, KeyDigest, api_key};
use crate::conversation::ChatRenderer;
use crate::limits::{AnswerPermit, EndpointLimits, LimitedBodies, OpenAnswers};
use crate::metrics::EndpointMetrics;
use crate::parameters::SamplingParameters;
use crate::replay::ReplayCache;
use crate::sessions::{SessionRegistry, SessionTurn};

/// The model that an endpoint serves.
#[derive(Clone, Debug)]
pub struct ServedPolicy {
    /// Its name in requests.
    pub name: String,
    /// Where it comes from, for `/v1/models`.
    pub root: String,
    /// Tokenizer, chat template and shape.
    pub directory: Arc<ModelDirectory>,
    /// Most tokens of prompt and completion.
    pub max_context: usize,
    /// Stop strings of the sampler, which end every completion beside those of the request.
    pub stop_strings: Vec<String>,
    /// Adapters that are served beside its weights, in the order of the sampler's.
    pub adapters: Vec<ServedAdapter>,
}

/// An adapter that an endpoint serves as a model of its own.
#[derive(Clone, Debug)]
pub struct ServedAdapter {
    /// Its name in requests.
    pub name: String,
    /// Where it comes from, for `/v1/models`.
    pub root: String,
}

/// How an endpoint serves.
#[derive(Clone, Debug)]
pub struct EndpointConfig {
    /// The model.
    pub policy: ServedPolicy,
    /// Limits of requests.
    pub limits: EndpointLimits,
    /// The key that clients send, if one is required.
    pub token: Option<String>,
    /// Sessions of agents, if it has any.
    pub sessions: Option<Arc<dyn SessionRegistry>>,
}

/// An endpoint without its listener. Clones are the same.
#[derive(Clone, Debug)]
pub struct Service {
    state: Arc<ServiceState>,
}

#[derive(Debug)]
struct ServiceState {
    config: EndpointConfig,
    keys: AccessKeys,
    renderer: ChatRenderer,
    queue: RequestHandle,
    bodies: LimitedBodies,
    open: OpenAnswers,
    metrics: EndpointMetrics,
    replay: ReplayCache,
    /// When it was made, seconds since 1970.
    created: u64,
    ids: RequestIds,
}

/// What a request asks of the sampler.
#[derive(Clone, Debug)]
pub struct Generation {
    /// `[P]` the tokens of each prompt.
    pub prompts: Vec<Vec<u32>>,
    /// How they are continued.
    pub parameters: SamplingParameters,
    /// The field with the length of completions, for errors.
    pub length_field: &'static str,
}

impl Service {
    /// An endpoint whose requests go to `queue`.
    #[must_use]
    pub fn new(config: EndpointConfig, queue: RequestHandle) -> Self {
        let state = ServiceState {
            keys: AccessKeys::new(config.token.clone()),
            renderer: ChatRenderer::new(Arc::clone(&config.policy.directory)),
            queue,
            bodies: LimitedBodies::new(config.limits),
            open: OpenAnswers::new(config.limits),
            metrics: EndpointMetrics::new(&config.policy.name),
            replay: ReplayCache::default(),
            created: seconds_now(),
            ids: RequestIds::new(),
            config,
        };
        Self { state: Arc::new(state) }
    }

    /// The model.
    #[must_use]
    pub fn policy(&self) -> &ServedPolicy {
        &self.state.config.policy
    }

    /// Whether clients need a key.
    #[must_use]
    pub fn requires_key(&self) -> bool {
        self.state.keys.is_required()
    }

    /// The files of the model.
    #[must_use]
    pub fn directory(&self) -> &Arc<ModelDirectory> {
        &self.policy().directory
    }

    /// Its limits.
    #[must_use]
    pub fn limits(&self) -> &EndpointLimits {
        &self.state.config.limits
    }

    /// Renders conversations.
    #[must_use]
    pub fn renderer(&self) -> &ChatRenderer {
        &self.state.renderer
    }

    /// Where requests go.
    #[must_use]
    pub fn queue(&self) -> &RequestHandle {
        &self.state.queue
    }

    /// When it was made, seconds since 1970.
    #[must_use]
    pub fn created(&self) -> u64 {
        self.state.created
    }

    pub(crate) fn bodies(&self) -> &LimitedBodies {
        &self.state.bodies
    }

    pub(crate) fn metrics(&self) -> &EndpointMetrics {
        &self.state.metrics
    }

    pub(crate) fn replay(&self) -> &ReplayCache {
        &self.state.replay
    }

    /// The text of `/metrics`.
    #[must_use]
    pub fn metrics_text(&self) -> String {
        self.metrics().text(&self.queue().status(), self.state.open.count())
    }

    /// Answers that are open.
    #[must_use]
    pub fn open_answers(&self) -> usize {
        self.state.open.count()
    }

    /// An id that no other answer has, such as `chatcmpl-8f...`.
    #[must_use]
    pub fn id(&self, prefix: &str) -> String {
        format!("{prefix}{}", self.state.ids.next())
    }

    /// The digest of the key in these headers, if it is that of the endpoint or of a session.
    ///
    /// # Errors
    /// A key that is wrong.
    pub fn check_key(&self, headers: &HeaderMap) -> Result<KeyDigest, ApiError> {
        let key = api_key(headers);
        let of_session =
            |key: &str| self.state.config.sessions.as_ref().is_some_and(|sessions| sessions.knows(key));
        if !key.is_some_and(of_session) {
            self.state.keys.check(key)?;
        }
        Ok(KeyDigest::of(key.unwrap_or_default()))
    }

    /// The turn of the session whose key is in these headers; `None` if it is no key of a session.
    ///
    /// # Errors
    /// A session that cannot have a turn now.
    pub(crate) fn begin_turn(&self, headers: &HeaderMap) -> Result<Option<Box<dyn SessionTurn>>, ApiError> {
        let sessions = self.state.config.sessions.as_deref().zip(api_key(headers));
        sessions.and_then(|(sessions, key)| sessions.begin_turn(key)).transpose()
    }

    /// Counts an answer to the client with `key` as open.
    pub(crate) fn open(&self, key: KeyDigest) -> Result<AnswerPermit, ApiError> {
        self.state.open.open(key)
    }

    /// The index of the adapter that is named `name`; `None` for the model itself, which a request without a name means.
    ///
    /// # Errors
    /// A name of neither.
    pub fn adapter(&self, name: Option<&str>) -> Result<Option<usize>, ApiError> {
        let ServedPolicy { name: model, adapters, .. } = self.policy();
        let Some(name) = name.filter(|name| name != model) else { return Ok(None) };
        match adapters.iter().position(|adapter| adapter.name == name) {
            Some(index) => Ok(Some(index)),
            None => {
                let served = [&model[..]].into_iter().chain(adapters.iter().map(|adapter| &adapter.name[..]));
                Err(ApiError::unknown_model(name, served))
            }
        }
    }

    /// The name of the model with this adapter.
    #[must_use]
    pub fn name_of(&self, adapter: Option<usize>) -> &str {
        let policy = self.policy();
        adapter.and_then(|index| policy.adapters.get(index)).map_or(&policy.name, |adapter| &adapter.name)
    }

    /// Whether every token of `prompt [P]` has a row of the embedding.
    ///
    /// # Errors
    /// The first that has none.
    pub fn check_tokens(&self, prompt: &[u32], param: &str) -> Result<(), ApiError> {
        let vocabulary = self.directory().config().vocab_size;
        let Some(id) = prompt.iter().find(|id| **id as usize >= vocabulary) else { return Ok(()) };
        let message = format!("the token id {id} is out of vocabulary: the model has {vocabulary} tokens");
        Err(ApiError::invalid(param, message))
    }

    /// Submits `generation`. A session's turn that the client has decides how it is sampled.
    ///
    /// # Errors
    /// Prompts that are empty, out of vocabulary or too long; a full queue.
    pub(crate) fn begin(
        &self,
        mut generation: Generation,
        turn: Option<Box<dyn SessionTurn>>,
        permit: AnswerPermit,
    ) -> Result<RunningAnswer, ApiError> {
        let mut turn = turn;
        if let Some(turn) = &mut turn {
            generation.parameters.sampling = turn.sampling(generation.parameters.sampling);
            if let Some(seed) = turn.seed() {
                generation.parameters.options.seed = Some(seed);
            }
            let prompt = generation.prompts.iter().map(Vec::len).max().unwrap_or(0);
            generation.parameters.max_tokens = turn.longest(prompt, generation.parameters.max_tokens);
        }
        let queue = turn.as_ref().and_then(|turn| turn.requests()).unwrap_or_else(|| self.queue().clone());
        let requests: Result<Vec<SampleRequest>, ApiError> =
            generation.prompts.iter().map(|prompt| self.request(prompt, &generation)).collect();
        let mut pending = Vec::with_capacity(generation.prompts.len());
        for request in requests? {
            self.metrics().prompt(request.prompt.len());
            pending.push(queue.submit(request)?);
        }
        let parts = AnswerParts { generation, requests: pending, turn, permit };
        Ok(RunningAnswer::new(self.clone(), parts))
    }

    fn request(&self, prompt: &[u32], generation: &Generation) -> Result<SampleRequest, ApiError> {
        let Generation { parameters, length_field, .. } = generation;
        if prompt.is_empty() {
            return Err(ApiError::invalid(
                "prompt",
                "a prompt has no tokens; a model continues at least one",
            ));
        }
        self.check_tokens(prompt, "prompt")?;
        self.check_tokens(&parameters.options.stop.token_ids, "stop_token_ids")?;
        let (context, length) = (self.policy().max_context, prompt.len());
        let left = context.saturating_sub(length);
        let most = parameters.max_tokens.unwrap_or(left);
        if left == 0 || most > left {
            let message = format!(
                "this model's context has {context} tokens: the prompt has {length} and {most} were asked for; shorten the \
                 prompt or lower `{length_field}`"
            );
            return Err(ApiError::invalid(*length_field, message));
        }
        Ok(SampleRequest {
            group: GroupId::default(),
            prompt: prompt.to_vec(),
            first_index: 0,
            turn: 0,
            samples: parameters.samples,
            sampling: parameters.sampling,
            max_completion_length: most,
            baseline: false,
            keep_cache: false,
            options: parameters.options.clone(),
        })
    }
}

/// Ids of answers: a random number of the process, and a counter.
#[derive(Debug)]
struct RequestIds {
    random: [u8; 16],
    next: AtomicU64,
}

impl RequestIds {
    fn new() -> Self {
        let mut random = [0; 16];
        // Without randomness ids are unique within the process.
        let _ = getrandom::fill(&mut random);
        Self { random, next: AtomicU64::new(0) }
    }

    fn next(&self) -> String {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.random).update(&number.to_le_bytes());
        hasher.finalize().to_hex()[..32].to_owned()
    }
}

/// Seconds since 1970.
pub(crate) fn seconds_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
