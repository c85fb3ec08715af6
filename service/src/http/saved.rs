//! Routes of training runs and of what was saved of them.
//!
//! Invariant: a training run is a model of the user, by the id of the model; what is saved of it has the id `weights/NAME` or
//! `sampler_weights/NAME`.

use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, Request, State};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Value, json};

use super::body::{ApiState, blocking};
use super::dates::rfc3339;
use super::refusal::{HttpRefusal, JsonReply};
use crate::training::{ModelInfo, SavedInfo, UserId};
use crate::wire::WeightsInfoBody;

/// Items of a page that does not say how many, as the SDK.
const PAGE_ITEMS: usize = 20;
/// Most items of a page.
const MAX_PAGE_ITEMS: usize = 1000;
/// Kinds of what is saved, in paths.
const KINDS: [&str; 2] = ["weights", "sampler_weights"];

/// Which part of a list is wanted.
#[derive(Deserialize)]
pub(super) struct PageQuery {
    limit: Option<usize>,
    offset: Option<usize>,
    project_id: Option<String>,
}

impl PageQuery {
    /// This part of `items`, and its place in the whole.
    fn of<T>(&self, items: Vec<T>) -> Result<(Vec<T>, Value), HttpRefusal> {
        if self.project_id.is_some() {
            return Err(HttpRefusal::new(400, "`project_id`: there are no projects here; leave it out"));
        }
        let limit = self.limit.unwrap_or(PAGE_ITEMS).min(MAX_PAGE_ITEMS);
        let offset = self.offset.unwrap_or(0);
        let cursor = json!({"offset": offset, "limit": limit, "total_count": items.len()});
        Ok((items.into_iter().skip(offset).take(limit).collect(), cursor))
    }
}

/// The path of what is saved, of the parts of a route.
pub(super) fn saved_path(run: &str, kind: &str, name: &str) -> Result<String, HttpRefusal> {
    let plain = |part: &str| !part.is_empty() && !part.contains('/') && part != "." && part != "..";
    if !KINDS.contains(&kind) || !plain(run) || !plain(name) {
        let message =
            format!("`{kind}/{name}` is no checkpoint; its id is weights/NAME or sampler_weights/NAME");
        return Err(HttpRefusal::new(404, message));
    }
    Ok(format!("tinker://{run}/{kind}/{name}"))
}

fn checkpoint(saved: &SavedInfo) -> Value {
    let id = saved.path.strip_prefix("tinker://").and_then(|path| path.split_once('/')).map(|(_, id)| id);
    json!({
        "checkpoint_id": id.unwrap_or(&saved.path),
        "checkpoint_type": if saved.is_state { "training" } else { "sampler" },
        "time": rfc3339(saved.saved),
        "tinker_path": saved.path,
        "size_bytes": saved.bytes,
        "public": false,
        "expires_at": saved.expires.map(rfc3339),
    })
}

fn training_run(user: UserId, model: &ModelInfo, saved: &[SavedInfo]) -> Value {
    let last = |is_state| saved.iter().rev().find(|saved| saved.is_state == is_state).map(checkpoint);
    let owner: String = user.0.iter().map(|byte| format!("{byte:02x}")).collect();
    json!({
        "training_run_id": model.model_id,
        "base_model": model.base.name,
        "model_owner": owner,
        "is_lora": model.lora.is_some(),
        "corrupted": false,
        "lora_rank": model.lora.map(|lora| lora.rank),
        "last_request_time": rfc3339(model.last_request),
        "last_checkpoint": last(true),
        "last_sampler_checkpoint": last(false),
    })
}

pub(super) async fn runs(
    State(api): State<ApiState>,
    page: Result<Query<PageQuery>, QueryRejection>,
    request: Request,
) -> Result<Response, HttpRefusal> {
    let user = api.access.user(request.headers())?;
    let (models, cursor) = page?.of(api.service.models(user))?;
    let listed = blocking(move || {
        let run = |model: &ModelInfo| {
            let saved = api.service.saved(user, &model.model_id)?;
            Ok::<Value, HttpRefusal>(training_run(user, model, &saved))
        };
        models.iter().map(run).collect::<Result<Vec<Value>, _>>()
    });
    Ok(JsonReply(json!({"training_runs": listed.await??, "cursor": cursor})).into_response())
}

pub(super) async fn run(
    State(api): State<ApiState>,
    Path(id): Path<String>,
    request: Request,
) -> Result<Response, HttpRefusal> {
    let user = api.access.user(request.headers())?;
    let model = api.service.model(user, &id)?;
    let saved = blocking(move || api.service.saved(user, &id)).await??;
    Ok(JsonReply(training_run(user, &model, &saved)).into_response())
}

pub(super) async fn of_run(
    State(api): State<ApiState>,
    Path(id): Path<String>,
    request: Request,
) -> Result<Response, HttpRefusal> {
    let user = api.access.user(request.headers())?;
    let saved = blocking(move || api.service.saved(user, &id)).await??;
    let checkpoints: Vec<Value> = saved.iter().map(checkpoint).collect();
    Ok(JsonReply(json!({"checkpoints": checkpoints})).into_response())
}

pub(super) async fn of_user(
    State(api): State<ApiState>,
    page: Result<Query<PageQuery>, QueryRejection>,
    request: Request,
) -> Result<Response, HttpRefusal> {
    let user = api.access.user(request.headers())?;
    let all = blocking(move || {
        let mut all = Vec::new();
        for model in api.service.models(user) {
            all.extend(api.service.saved(user, &model.model_id)?);
        }
        Ok::<Vec<SavedInfo>, HttpRefusal>(all)
    });
    let mut all = all.await??;
    all.sort_by_key(|saved| std::cmp::Reverse(saved.saved));
    let (saved, cursor) = page?.of(all)?;
    let checkpoints: Vec<Value> = saved.iter().map(checkpoint).collect();
    Ok(JsonReply(json!({"checkpoints": checkpoints, "cursor": cursor})).into_response())
}

pub(super) async fn delete(
    State(api): State<ApiState>,
    Path((run, kind, name)): Path<(String, String, String)>,
    request: Request,
) -> Result<Response, HttpRefusal> {
    let user = api.access.user(request.headers())?;
    let path = saved_path(&run, &kind, &name)?;
    api.waiting(move |service| service.delete_saved(user, &path)).await??;
    Ok(JsonReply(json!({})).into_response())
}

pub(super) async fn weights_info(
    State(api): State<ApiState>,
    request: Request,
) -> Result<Response, HttpRefusal> {
    let (user, body) = api.json::<WeightsInfoBody>(request).await?;
    let (model, ..) = blocking(move || api.service.saved_at(user, &body.tinker_path)).await??;
    let lora = model.lora;
    let body = json!({
        "base_model": model.base.name,
        "is_lora": lora.is_some(),
        "lora_rank": lora.map(|lora| lora.rank),
        "train_unembed": lora.map(|lora| lora.train_unembed),
        "train_mlp": lora.map(|lora| lora.train_mlp),
        "train_attn": lora.map(|lora| lora.train_attn),
    });
    Ok(JsonReply(body).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_has_the_id_that_the_sdk_makes_of_its_path() {
        let saved = SavedInfo {
            path: saved_path("s1:train:0", "sampler_weights", "w1").unwrap(),
            is_state: false,
            saved: 951_827_696,
            bytes: 12,
            expires: Some(951_827_697),
        };
        let shown = checkpoint(&saved);
        assert_eq!(shown["checkpoint_id"], "sampler_weights/w1");
        assert_eq!(shown["checkpoint_type"], "sampler");
        assert_eq!(shown["tinker_path"], "tinker://s1:train:0/sampler_weights/w1");
        assert_eq!(shown["expires_at"], "2000-02-29T12:34:57Z");
    }

    #[test]
    fn parts_that_are_no_names_are_refused() {
        for (run, kind, name) in [
            ("s1:train:0", "external_weights", "a"),
            ("..", "weights", "a"),
            ("s1", "weights", ".."),
            ("s1", "weights", "a/b"),
            ("", "weights", "a"),
        ] {
            assert_eq!(saved_path(run, kind, name).unwrap_err().status(), 404, "{run} {kind} {name}");
        }
    }

    #[test]
    fn a_page_is_a_part_of_the_whole() {
        let page = |limit, offset| PageQuery { limit, offset, project_id: None };
        let (items, cursor) = page(Some(2), Some(1)).of((0..5).collect()).unwrap();
        assert_eq!(items, [1, 2]);
        assert_eq!(cursor, json!({"offset": 1, "limit": 2, "total_count": 5}));
        assert_eq!(page(None, None).of((0..50).collect()).unwrap().0.len(), PAGE_ITEMS);
        assert!(page(Some(usize::MAX), Some(usize::MAX)).of(vec![1]).unwrap().0.is_empty());
        let project = PageQuery { limit: None, offset: None, project_id: Some("p".to_owned()) };
        assert_eq!(project.of(vec![1]).unwrap_err().status(), 400);
    }
}
