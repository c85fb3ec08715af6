//! Schemas that cannot be derived: a prompt is a text or messages, and answers have every field where requests may
//! omit some. Invariant: the schema of an answer is made from that of the request, so they agree.

use std::borrow::Cow;

use utoipa::openapi::schema::{AnyOfBuilder, ArrayBuilder, ObjectBuilder, Schema, Type};
use utoipa::openapi::{Ref, RefOr};
use utoipa::{PartialSchema, ToSchema};

use super::group::{GroupView, MessageBody, TaskBody, TrajectoryBody};

type SchemaRef = RefOr<Schema>;

const TASK: &str = "Task";
const TRAJECTORY: &str = "Trajectory";

/// A text, or a list of messages.
pub(super) fn prompt() -> Schema {
    let messages = ArrayBuilder::new().items(Ref::from_schema_name(MessageBody::name()));
    let text = ObjectBuilder::new().schema_type(Type::String);
    Schema::AnyOf(AnyOfBuilder::new().item(text).item(messages).build())
}

/// Why a turn ended.
pub(super) fn stop() -> Schema {
    let words = ["stop_token", "stop_string", "length"];
    ObjectBuilder::new().schema_type(Type::String).enum_values(Some(words)).build().into()
}

impl PartialSchema for GroupView<'_> {
    fn schema() -> SchemaRef {
        let trajectories = ArrayBuilder::new().items(Ref::from_schema_name(TRAJECTORY)).min_items(Some(1));
        ObjectBuilder::new()
            .description(Some("The trajectories of one task that are compared with each other."))
            .property("id", u64::schema())
            .property("task", Ref::from_schema_name(TASK))
            .property("trajectories", trajectories)
            .required("id")
            .required("task")
            .required("trajectories")
            .into()
    }
}

impl ToSchema for GroupView<'_> {
    fn name() -> Cow<'static, str> {
        Cow::Borrowed("Group")
    }

    fn schemas(schemas: &mut Vec<(String, SchemaRef)>) {
        TaskBody::schemas(schemas);
        TrajectoryBody::schemas(schemas);
        schemas.push((MessageBody::name().into_owned(), MessageBody::schema()));
        schemas.push((TASK.to_owned(), given(TaskBody::schema(), None, &[])));
        // An answer always has the runs, and branches and experts only where there are some.
        let trajectory = given(TrajectoryBody::schema(), Some("policy_version"), &["branches", "experts"]);
        schemas.push((TRAJECTORY.to_owned(), trajectory));
    }
}

/// The schema without the field `absent`, and with all others required but `optional`.
fn given(shape: SchemaRef, absent: Option<&str>, optional: &[&str]) -> SchemaRef {
    let RefOr::T(Schema::Object(mut object)) = shape else { return shape };
    if let Some(field) = absent {
        object.properties.remove(field);
    }
    object.required =
        object.properties.keys().filter(|field| !optional.contains(&field.as_str())).cloned().collect();
    RefOr::T(Schema::Object(object))
}
