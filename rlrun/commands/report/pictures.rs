//! The curves of runs as PNG files: one with all panels of the first screen of the live page, or one for each panel.
//!
//! Invariant: a curve shows the smallest and the largest value of what a pixel stands for, as on the page.

use std::path::{Path, PathBuf};

use dashboard::{PanelCurve, PanelCurves};

use super::{refused, write};
use crate::chart::sheet::{TitledChart, sheet};
use crate::chart::{Chart, Scale, Series, SeriesStyle};
use crate::failure::Failure;

/// Pixels that curves are computed for, the width of a chart.
const PIXELS: usize = 440;
/// A curve of at most this many points shows each of them.
const FEW: usize = 24;

/// Writes the curves of `runs` to the file `place`, or into the directory of this name. Returns what was written.
pub(super) fn write_all(runs: &[PathBuf], place: &Path) -> Result<String, Failure> {
    let panels = dashboard::panel_curves(runs, PIXELS).map_err(refused)?;
    if panels.is_empty() {
        return Err(Failure::NotThere("the runs have no metrics of the first screen yet".to_owned()));
    }
    let several = runs.len() > 1;
    let charts: Vec<TitledChart<'_>> = panels.iter().map(|panel| chart(panel, several)).collect();
    if place.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("png")) {
        write(place, &sheet(&charts))?;
        return Ok(format!("wrote {}, {} charts", place.display(), charts.len()));
    }
    let failed = |source| Failure::System { what: format!("make {}", place.display()), source };
    std::fs::create_dir_all(place).map_err(failed)?;
    for chart in charts {
        let file = place.join(format!("{}.png", file_name(chart.title)));
        write(&file, &sheet(&[TitledChart { heading: "", ..chart }]))?;
    }
    Ok(format!("wrote {} charts into {}", panels.len(), place.display()))
}

/// A panel as a chart. With `several` runs a curve has the name of its run.
fn chart(panel: &PanelCurves, several: bool) -> TitledChart<'_> {
    let mut series = Vec::new();
    let mut color = 0;
    let one_metric = panel.curves.iter().all(|curve| curve.metric == panel.curves[0].metric);
    for curve in &panel.curves {
        let end = ["_low", "_high"].into_iter().find_map(|end| curve.metric.strip_suffix(end));
        let of =
            panel.curves.iter().position(|other| Some(&other.metric[..]) == end && other.run == curve.run);
        // The ends of an interval have the color of its middle, which comes before them, and no name.
        let (mark, color, name) = match of {
            Some(_) => (SeriesStyle::Faint, color, String::new()),
            None => {
                color += 1;
                (SeriesStyle::Line, color, name_of(curve, several, one_metric))
            }
        };
        series.extend(parts(curve, mark, color, name));
    }
    let chart =
        Chart { x_words: "step", y_words: "", x_scale: Scale::Linear, y_scale: Scale::Linear, series };
    TitledChart { heading: panel.row, title: panel.title, chart }
}

fn name_of(curve: &PanelCurve, several: bool, one_metric: bool) -> String {
    match (several, one_metric) {
        (false, _) => curve.metric.clone(),
        (true, true) => curve.run.clone(),
        (true, false) => format!("{} of {}", curve.metric, curve.run),
    }
}

/// The parts of a curve between values that are not finite, the first one with its name. Single points are dots.
fn parts(curve: &PanelCurve, mark: SeriesStyle, color: usize, name: String) -> Vec<Series> {
    let lines = curve.points.split(|(_, y)| !y.is_finite()).filter(|points| !points.is_empty());
    let mut series: Vec<Series> = lines
        .flat_map(|points| {
            let of = |mark| Series { name: String::new(), points: points.to_vec(), mark, color };
            let dots = points.len() == 1 || (curve.points.len() <= FEW && mark == SeriesStyle::Line);
            [Some(of(mark)), dots.then(|| of(SeriesStyle::Dots))].into_iter().flatten()
        })
        .collect();
    if let Some(first) = series.first_mut() {
        first.name = name;
    }
    series
}

/// A title as the name of a file.
fn file_name(title: &str) -> String {
    let words =
        title.split(|character: char| !character.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    words.map(str::to_ascii_lowercase).collect::<Vec<_>>().join("_")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_all_panels_and_a_directory_one_file_for_each() {
        let files = tempfile::tempdir().unwrap();
        let runs: Vec<PathBuf> = ["first", "second"].map(|name| files.path().join(name)).to_vec();
        for (at, run) in runs.iter().enumerate() {
            std::fs::create_dir(run).unwrap();
            let line = |step: usize| {
                format!(
                    "{{\"step\":{step},\"reward/mean\":{},\"eval/accuracy\":0.5,\"eval/accuracy_low\":0.4,\"kl/mismatch\":null}}\n",
                    at + step
                )
            };
            let lines: String = (1..=3).map(line).collect();
            std::fs::write(run.join("metrics.jsonl"), lines).unwrap();
        }
        let sheet = files.path().join("all.png");
        assert!(write_all(&runs, &sheet).unwrap().ends_with("3 charts"));
        let ((width, height), _) = crate::chart::png::decode(&std::fs::read(&sheet).unwrap());
        assert!(width > 1000 && height > 600, "{width} x {height}");
        let directory = files.path().join("each");
        write_all(&runs[..1], &directory).unwrap();
        let mut names: Vec<String> = std::fs::read_dir(&directory)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(names, ["held_out_accuracy.png", "kl_nats.png", "reward.png"]);
    }

    #[test]
    fn intervals_have_the_color_of_their_middle_and_gaps_divide_a_curve() {
        let files = tempfile::tempdir().unwrap();
        let lines = "{\"step\":1,\"eval/accuracy\":0.5,\"eval/accuracy_low\":0.4}\n{\"step\":2,\"eval/accuracy\":null}\n{\"step\":3,\"eval/accuracy\":0.75}\n";
        std::fs::write(files.path().join("metrics.jsonl"), lines).unwrap();
        let panels = dashboard::panel_curves(&[files.path().to_owned()], 100).unwrap();
        let TitledChart { heading, title, chart } = chart(&panels[0], false);
        assert_eq!((heading, title), ("Reward", "held-out accuracy"));
        let drawn: Vec<_> =
            chart.series.iter().map(|one| (&one.name[..], one.points.clone(), one.mark, one.color)).collect();
        let (line, dots) = (SeriesStyle::Line, SeriesStyle::Dots);
        assert_eq!(
            drawn,
            [
                ("eval/accuracy", vec![(1.0, 0.5)], line, 1),
                ("", vec![(1.0, 0.5)], dots, 1),
                ("", vec![(3.0, 0.75)], line, 1),
                ("", vec![(3.0, 0.75)], dots, 1),
                ("", vec![(1.0, 0.4)], SeriesStyle::Faint, 1),
                ("", vec![(1.0, 0.4)], dots, 1),
            ]
        );
    }
}
