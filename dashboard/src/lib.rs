//! The live page of runs: reads the files of run directories and serves them to a browser.
//!
//! - `lines`: complete lines of a growing file; `table`: the metrics of a run as columns; `downsample`: at most two points
//!   per pixel; `events`: the events and remarks of a run
//! - `samples`: sampled groups, their pages and their search; `tokens`: the tokens of one trajectory; `compare`: the same
//!   tasks at two steps; `recipe`: resolved values with their origins
//! - [`why`]: the critical path of every step; `timeline`: what each role did when; `span_line`: a line of its file; `status`: what the roles do now; `about`: environment and timings
//! - `run`: one run directory; `glance`: the same from the ends of its files; `catalog`: all runs of a page; `panels`: the first screen; `prometheus`: their last values
//! - `access`: token, host and headers; `answers`, `routes`, `stream`: the API; `page`: the embedded files; `server`: connections
//! - `report`: the same page as one file, with the answers of the API in it; `bundle`: its scripts as one
//!
//! Invariant: a run directory is only read. Nothing is written into it or locked, and no file outside it is opened. Memory
//! and responses have limits that do not depend on the size of the files.
//!
//! ```no_run
//! use dashboard::{DashboardConfig, DashboardServer};
//!
//! # async fn example() -> Result<(), dashboard::DashboardError> {
//! let listen = ([127, 0, 0, 1], 0).into();
//! let config = DashboardConfig { listen, token: None, runs: vec!["outputs/grpo_math".into()], advisor: None };
//! let server = DashboardServer::bind(config).await?;
//! println!("http://{}", server.local_addr());
//! server.serve(std::future::pending()).await;
//! # Ok(())
//! # }
//! ```

mod about;
mod access;
mod answers;
mod bundle;
mod catalog;
mod compare;
mod downsample;
mod events;
mod glance;
mod lines;
mod page;
mod panels;
mod prometheus;
mod recipe;
mod report;
mod routes;
mod run;
mod samples;
mod server;
mod span_line;
mod status;
mod stream;
mod table;
mod timeline;
mod tokens;
pub mod why;

pub use events::LastEvent;
pub use glance::{RunGlance, last_event, planned_steps};
pub use panels::{PanelCurve, PanelCurves};
pub use report::{MAX_REPORT_BYTES, ReportError, panel_curves, report};
pub use server::{DashboardConfig, DashboardError, DashboardServer, is_run};
