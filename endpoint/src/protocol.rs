//! What a protocol adds to the service: how its requests are read and how its answers are written.
//!
//! Invariant: one path serves every protocol, streaming or not: key, body, repetition, request, answer. A protocol is a
//! [`Protocol`] with its [`AnswerWriter`], which only translate.

use std::time::Instant;

use axum::body::Body;
use axum::extract::Request;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde_json::Value;

use crate::ApiError;
use crate::answer::{Choice, Delta, RunningAnswer, Usage};
use crate::conversation::Conversation;
use crate::fields::Fields;
use crate::replay::{AnswerInProgress, FinishedAnswer, Repetition, RequestDigest, is_repeated};
use crate::service::{Generation, Service};
use crate::sessions::SessionTurn;
use crate::sse;

/// Media type of answers that are no streams.
pub(crate) const JSON: &str = "application/json";

/// The requests of a protocol.
pub(crate) trait Protocol: Send + 'static {
    /// Reads a request. It may render and tokenise, so it runs on a thread that may block.
    fn read(call: &mut Call) -> Result<PlannedAnswer, ApiError>;

    /// The body of an error.
    fn error(error: &ApiError) -> Value {
        error.openai_body()
    }
}

/// A request as a protocol reads it.
#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) service: Service,
    pub(crate) fields: Fields,
    /// The turn that the request is of a session.
    pub(crate) turn: Option<Box<dyn SessionTurn>>,
    /// The adapter that the request names as its model.
    pub(crate) adapter: Option<usize>,
}

impl Call {
    /// `[P]` the prompt of a conversation: that of the session, if the request is a turn of one.
    pub(crate) fn encode(&mut self, conversation: Conversation) -> Result<Vec<u32>, ApiError> {
        let renderer = self.service.renderer();
        match &mut self.turn {
            Some(turn) => turn.prompt(conversation, renderer),
            None => renderer.encode(conversation),
        }
    }

    /// Takes `model`, which is the model of this endpoint or one of its adapters. Returns its name.
    pub(crate) fn take_model(&mut self) -> Result<String, ApiError> {
        let name = self.fields.text("model")?;
        self.adapter = self.service.adapter(name.as_deref())?;
        Ok(self.service.name_of(self.adapter).to_owned())
    }
}

/// What a request wants.
pub(crate) struct PlannedAnswer {
    pub(crate) generation: Generation,
    /// Whether it wants a stream.
    pub(crate) stream: bool,
    pub(crate) writer: Box<dyn AnswerWriter>,
}

/// A whole answer.
#[derive(Debug)]
pub(crate) struct Answered<'a> {
    /// `[P]` the tokens of each prompt.
    pub(crate) prompts: &'a [Vec<u32>],
    /// By index.
    pub(crate) choices: &'a [Choice],
}

/// Writes the answer to one request.
pub(crate) trait AnswerWriter: Send {
    /// The id of the answer.
    fn id(&self) -> &str;

    /// The body of an answer that is no stream.
    fn whole(&mut self, answer: &Answered<'_>) -> Value;

    /// The events before the first token; `prompts` are the `[P]` tokens of each prompt.
    fn begin(&mut self, prompts: &[Vec<u32>]) -> Vec<sse::SseEvent>;

    /// The events of new tokens.
    fn delta(&mut self, delta: &Delta) -> Vec<sse::SseEvent>;

    /// The events after the last token.
    fn end(&mut self, usage: Usage) -> Vec<sse::SseEvent>;

    /// The event of a failure in the middle of a stream.
    fn failed(&mut self, error: &ApiError) -> sse::SseEvent {
        sse::SseEvent::data(&error.openai_body())
    }
}

impl Answered<'_> {
    pub(crate) fn usage(&self) -> Usage {
        Usage {
            prompt_tokens: self.prompts.iter().map(Vec::len).sum(),
            completion_tokens: self.choices.iter().map(|choice| choice.token_ids.len()).sum(),
        }
    }
}

/// Answers a request of protocol `P`.
pub(crate) async fn answer<P: Protocol>(service: Service, request: Request) -> Response {
    match try_answer::<P>(service, request).await {
        Ok(response) => response,
        Err(error) => error.respond(&P::error(&error)),
    }
}

async fn try_answer<P: Protocol>(service: Service, request: Request) -> Result<Response, ApiError> {
    let (parts, body) = request.into_parts();
    let (headers, path) = (&parts.headers, parts.uri.path());
    let key = service.check_key(headers)?;
    let read = |body: &[u8]| Ok((Fields::parse(body)?, RequestDigest::of(key, path, headers, body)));
    let (fields, digest) = service.bodies().read(headers, body, read).await?;
    if is_repeated(headers) {
        let found = match service.replay().find(digest, Instant::now()) {
            Repetition::None => None,
            Repetition::Finished(answer) => Some(answer),
            Repetition::InFlight(waiting) => waiting.wait().await,
        };
        if let Some(answer) = found {
            service.metrics().replayed.inc();
            return Ok(
                ([(header::CONTENT_TYPE, answer.content_type)], answer.body.to_string()).into_response()
            );
        }
    }
    let permit = service.open(key)?;
    let progress = service.replay().begin(digest);
    let turn = service.begin_turn(headers)?;
    let mut call = Call { service: service.clone(), fields, turn, adapter: None };
    let planning = tokio::task::spawn_blocking(move || {
        let planned = P::read(&mut call);
        (planned, call)
    });
    let (planned, call) = planning.await.map_err(|_| ApiError::internal("reading the request failed"))?;
    let PlannedAnswer { mut generation, stream, writer } = planned?;
    call.fields.finish()?;
    generation.parameters.options.stream = stream;
    generation.parameters.options.adapter = call.adapter;
    let answer = service.begin(generation, call.turn, permit)?.named(writer.id());
    if stream {
        return Ok(sse::respond(answer, writer, progress));
    }
    whole(answer, writer, progress).await
}

async fn whole(
    answer: RunningAnswer,
    mut writer: Box<dyn AnswerWriter>,
    progress: AnswerInProgress,
) -> Result<Response, ApiError> {
    let (prompts, choices) = answer.collect().await?;
    let body = writer.whole(&Answered { prompts: &prompts, choices: &choices }).to_string();
    let finished = FinishedAnswer { content_type: JSON, body: body.as_str().into() };
    progress.finish(finished, Instant::now());
    Ok(([(header::CONTENT_TYPE, JSON)], Body::from(body)).into_response())
}
