//! `judge`: a language model behind an OpenAI-compatible server scores completions (LLM as a judge).
//!
//! Invariant: one request for each completion, and the reply is data: a parser reads the score from it, and a reply without a
//! score is an error that shows its end. A completion can persuade a model to give a score (prompt injection). The default
//! template delimits the completion and states that it is not an instruction; this reduces the risk and does not exclude it.

pub mod template;
pub mod verdict;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::Semaphore;

use self::template::QuestionTemplate;
use self::verdict::ReplyParser;
use crate::http::transport::{HttpTransport, cut, seed};
use crate::registry::RewardKind;
use crate::reward::{Judged, each};
use crate::{BoxFuture, Load, Outcome, Reward, RewardContext, RewardError, RewardInput, RewardSpec};

const MAX_TOKENS: u64 = 512;
/// The largest score that the default question asks for.
const DEFAULT_TOP: f64 = 10.0;
/// Longest end of a reply that is shown beside a sample, characters.
const SHOWN: usize = 400;

/// The kind `judge`.
pub(crate) fn kind() -> RewardKind {
    const KEYS: [&str; 13] = [
        "url",
        "model",
        "system",
        "template",
        "temperature",
        "max_tokens",
        "parse",
        "choices",
        "scale",
        "allow",
        "token_env",
        "retries",
        "max_answer_kib",
    ];
    RewardKind::new("judge", &KEYS, &["url", "model"], |spec, context| {
        Ok(Box::new(JudgeReward::new(spec, context)?))
    })
}

/// Scores by a language model.
pub struct JudgeReward {
    name: String,
    transport: Arc<HttpTransport>,
    model: String,
    system: Option<String>,
    template: QuestionTemplate,
    parser: ReplyParser,
    temperature: f64,
    max_tokens: u64,
    timeout: Duration,
    running: Semaphore,
    load: Load,
}

impl JudgeReward {
    /// Makes the reward; the first request connects.
    ///
    /// # Errors
    /// No runtime, or an invalid parameter.
    pub fn new(spec: &RewardSpec, context: &RewardContext) -> Result<Self, RewardError> {
        context.runtime(spec)?;
        let template = QuestionTemplate::new(spec.template.as_deref())
            .map_err(|reason| spec.wrong("template", &reason))?;
        let temperature = spec.temperature.unwrap_or(0.0);
        if !(temperature.is_finite() && temperature >= 0.0) {
            return Err(spec.wrong("temperature", "must be a number from 0 on"));
        }
        Ok(Self {
            name: spec.name().to_owned(),
            transport: Arc::new(HttpTransport::new(spec, context, endpoint)?),
            model: spec.required("model", spec.model.clone())?,
            system: spec.system.clone(),
            template,
            parser: parser(spec)?,
            temperature,
            max_tokens: spec.max_tokens.unwrap_or(MAX_TOKENS),
            timeout: spec.timeout(),
            running: Semaphore::new(spec.concurrency.max(1)),
            load: Load::default(),
        })
    }

    async fn judge(&self, input: &RewardInput<'_>) -> Judged {
        let waiting = self.load.wait();
        let question = self.template.fill(&self.name, input)?;
        // The semaphore is never closed, so a permit always comes.
        let _permit = self.running.acquire().await;
        let _running = waiting.begin();
        let answer = self.transport.post(&self.body(&question), seed(input.trajectory()), self.timeout).await;
        let answer = answer.map_err(|error| error.of(&self.name, self.timeout, input.trajectory()))?;
        let failed = |reason: String| input.trajectory().failed(&self.name, reason);
        let reply = answer.pointer("/choices/0/message/content").and_then(Value::as_str);
        let reply = reply.ok_or_else(|| {
            failed(format!("the answer has no `choices[0].message.content`: {}", cut(&answer.to_string())))
        })?;
        if answer.pointer("/choices/0/finish_reason").and_then(Value::as_str) == Some("length") {
            let tokens = self.max_tokens;
            return Err(failed(format!(
                "the reply was cut off, raise `max_tokens` above {tokens}; it ends with: {}",
                end(reply)
            )));
        }
        match self.parser.read(reply) {
            Ok(value) => Ok(Outcome::from(value).with("reply", end(reply))),
            Err(reason) => Err(failed(format!("{reason} in the reply, which ends with: {}", end(reply)))),
        }
    }

    fn body(&self, question: &str) -> Value {
        let system = self.system.iter().map(|text| json!({"role": "system", "content": text}));
        let messages: Vec<_> = system.chain([json!({"role": "user", "content": question})]).collect();
        json!({
            "model": self.model,
            "messages": messages,
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
        })
    }
}

/// The endpoint of a server with this base URL, with or without `/v1`.
fn endpoint(url: &str) -> String {
    const PATH: &str = "/chat/completions";
    let url = url.trim_end_matches('/');
    if url.ends_with(PATH) {
        url.to_owned()
    } else if url.ends_with("/v1") {
        format!("{url}{PATH}")
    } else {
        format!("{url}/v1{PATH}")
    }
}

fn parser(spec: &RewardSpec) -> Result<ReplyParser, RewardError> {
    let Some(choices) = &spec.choices else {
        let parser = match &spec.parse {
            Some(pattern) => ReplyParser::number(pattern, spec.scale.unwrap_or(1.0)),
            None => {
                let top = spec.template.is_none().then_some(DEFAULT_TOP);
                ReplyParser::score(top, spec.scale.or(top).unwrap_or(1.0))
            }
        };
        return parser.map_err(|(field, reason)| spec.wrong(field, &reason));
    };
    if spec.parse.is_some() || spec.scale.is_some() {
        return Err(
            spec.wrong("choices", "is used with `parse` or `scale`, which are for numbers; keep one of them")
        );
    }
    if spec.template.is_none() {
        return Err(spec.wrong("choices", "needs a `template`, as the default one asks for a number"));
    }
    ReplyParser::word(choices).map_err(|reason| spec.wrong("choices", &reason))
}

/// The end of a text.
fn end(text: &str) -> String {
    let text = text.trim();
    match text.char_indices().rev().nth(SHOWN) {
        Some((begin, first)) => format!("...{}", &text[begin + first.len_utf8()..]),
        None => text.to_owned(),
    }
}

impl fmt::Debug for JudgeReward {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JudgeReward")
            .field("name", &self.name)
            .field("transport", &self.transport)
            .field("model", &self.model)
            .finish_non_exhaustive()
    }
}

impl Reward for JudgeReward {
    fn name(&self) -> &str {
        &self.name
    }

    fn score<'a>(&'a self, inputs: &'a [RewardInput<'a>]) -> BoxFuture<'a, Vec<Judged>> {
        each(inputs, |input| self.judge(input))
    }

    fn about(&self) -> Option<String> {
        Some(format!("asks `{}` at {}", self.model, self.transport.url()))
    }

    fn load(&self) -> &Load {
        &self.load
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_base_or_an_endpoint_is_enough() {
        for url in ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/chat/completions"] {
            assert_eq!(endpoint(url), "http://h:1/v1/chat/completions");
        }
        assert_eq!(endpoint("https://h/api/v1/"), "https://h/api/v1/chat/completions");
    }

    #[test]
    fn the_end_is_shown() {
        assert_eq!(end(" short "), "short");
        let long = format!("{}\u{e9}{}", "a".repeat(5), "b".repeat(SHOWN - 1));
        assert_eq!(end(&long), format!("...\u{e9}{}", "b".repeat(SHOWN - 1)));
    }
}
