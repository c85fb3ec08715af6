//! Charts with titles and legends on one canvas, in rows with headings.
//!
//! Invariant: a legend stands above its chart, so that it hides no curve. A sheet has at most [`MAX_CHARTS`] charts.

use std::convert::Infallible;

use plotters::coord::Shift;
use plotters::drawing::DrawingAreaErrorKind;
use plotters::prelude::*;

use super::canvas::{Canvas, CanvasBackend, text_width};
use super::{COLORS, Chart, ChartLook, FAINT, FAMILY, SeriesStyle};

/// Charts beside each other.
const COLUMNS: usize = 4;
/// Width and height of a chart with its title, without its legend, pixels.
const CHART: (i32, i32) = (520, 310);
/// Space around the sheet, pixels.
const MARGIN: i32 = 16;
/// Height of a heading, of a title and of a line of a legend, pixels.
const HEADING: i32 = 44;
const TITLE: i32 = 30;
const ENTRY: i32 = 22;
/// Sizes of fonts, pixels.
const HEADING_FONT: i32 = 25;
const TITLE_FONT: i32 = 19;
const ENTRY_FONT: i32 = 16;
/// Width of the line beside a name in a legend, and the space around it, pixels.
const SIGN: i32 = 22;
const GAP: i32 = 8;
/// Most charts of a sheet, so that its pixels stay below 100 MB.
const MAX_CHARTS: usize = 120;
/// Color of headings.
const GRAY: RGBColor = RGBColor(0x55, 0x55, 0x55);

const LOOK: ChartLook = ChartLook {
    text: 15,
    line: 2,
    margin: 10,
    label_areas: [42, 66],
    y_margin: 0.05,
    fine_grid: false,
    tick: 0.0,
};

type Area<'a> = DrawingArea<CanvasBackend<'a>, Shift>;
type SheetResult = Result<(), DrawingAreaErrorKind<Infallible>>;

/// A chart with its place on a sheet. The names of its series are in its legend.
#[derive(Debug)]
pub(crate) struct TitledChart<'a> {
    /// The heading that neighbours share; empty for none.
    pub(crate) heading: &'a str,
    pub(crate) title: &'a str,
    pub(crate) chart: Chart<'a>,
}

/// Charts beside each other, whose legends have one height.
struct SheetRow<'a, 'b> {
    heading: Option<&'a str>,
    charts: &'b [TitledChart<'a>],
    legend: i32,
}

/// The charts as a PNG file, in their order. One chart fills the sheet.
pub(crate) fn sheet(charts: &[TitledChart<'_>]) -> Vec<u8> {
    let charts = &charts[..charts.len().min(MAX_CHARTS)];
    let columns = charts.chunk_by(same_heading).map(<[_]>::len).max().unwrap_or(1).min(COLUMNS);
    let mut rows = Vec::new();
    for same in charts.chunk_by(same_heading) {
        for (at, charts) in same.chunks(columns).enumerate() {
            let heading = (at == 0 && !same[0].heading.is_empty()).then_some(same[0].heading);
            let legend = charts.iter().map(|one| legend_lines(&one.chart).len() as i32).max().unwrap_or(0);
            rows.push(SheetRow { heading, charts, legend: legend * ENTRY });
        }
    }
    let height: i32 = rows.iter().map(SheetRow::height).sum();
    let size = (columns as i32 * CHART.0 + 2 * MARGIN, height.max(CHART.1) + 2 * MARGIN);
    let mut canvas = Canvas::new((size.0.unsigned_abs(), size.1.unsigned_abs()));
    draw(&rows, CanvasBackend(&mut canvas)).expect("drawing on memory cannot fail");
    canvas.png()
}

fn same_heading(a: &TitledChart<'_>, b: &TitledChart<'_>) -> bool {
    a.heading == b.heading
}

impl SheetRow<'_, '_> {
    fn height(&self) -> i32 {
        self.heading.map_or(0, |_| HEADING) + self.legend + CHART.1
    }
}

fn draw(rows: &[SheetRow<'_, '_>], canvas: CanvasBackend<'_>) -> SheetResult {
    let sheet = canvas.into_drawing_area();
    let mut top = MARGIN;
    for row in rows {
        let mut under = top;
        if let Some(heading) = row.heading {
            let style = (FAMILY, HEADING_FONT).into_font().color(&GRAY);
            sheet.draw_text(heading, &style, (MARGIN + GAP, top + GAP))?;
            under += HEADING;
        }
        for (column, one) in row.charts.iter().enumerate() {
            let left = MARGIN + column as i32 * CHART.0;
            // The areas below are cut out by their borders, so that each chart sees its own alone.
            let (_, right) = sheet.split_horizontally(left);
            let (own, _) = right.split_horizontally(CHART.0);
            let (_, lower) = own.split_vertically(under);
            let (own, _) = lower.split_vertically(row.legend + CHART.1);
            place(one, &own, row.legend)?;
        }
        top += row.height();
    }
    Ok(())
}

/// A chart under its title and its legend, which has `legend` pixels.
fn place(one: &TitledChart<'_>, area: &Area<'_>, legend: i32) -> SheetResult {
    area.draw_text(one.title, &(FAMILY, TITLE_FONT).into_font().into(), (GAP, GAP))?;
    for (line, entries) in legend_lines(&one.chart).iter().enumerate() {
        let middle = TITLE + line as i32 * ENTRY + ENTRY / 2;
        for entry in entries {
            let color = COLORS[entry.color % COLORS.len()].mix(if entry.faint { FAINT } else { 1.0 });
            let ends = [(entry.left, middle), (entry.left + SIGN, middle)];
            area.draw(&PathElement::new(ends, color.stroke_width(2 * LOOK.line)))?;
            let style = (FAMILY, ENTRY_FONT).into_font().into();
            area.draw_text(entry.name, &style, (entry.left + SIGN + GAP, middle - ENTRY_FONT / 2 + 2))?;
        }
    }
    let (_, below) = area.split_vertically(TITLE + legend);
    let mut chart = one.chart.clone();
    chart.series.iter_mut().for_each(|series| series.name.clear());
    chart.draw(&below, LOOK)
}

/// A name in a legend.
struct LegendEntry<'a> {
    name: &'a str,
    color: usize,
    faint: bool,
    /// Pixels from the left.
    left: i32,
}

/// The names of the series, line by line.
fn legend_lines<'a>(chart: &'a Chart<'_>) -> Vec<Vec<LegendEntry<'a>>> {
    let mut lines: Vec<Vec<LegendEntry<'a>>> = Vec::new();
    let mut left = i32::MAX;
    for series in chart.series.iter().filter(|series| !series.name.is_empty()) {
        let width = SIGN + GAP + text_width(&series.name, ENTRY_FONT);
        if left > CHART.0 - width - GAP {
            left = GAP;
            lines.push(Vec::new());
        }
        let entry = LegendEntry {
            name: &series.name,
            color: series.color,
            faint: series.mark == SeriesStyle::Faint,
            left,
        };
        if let Some(line) = lines.last_mut() {
            line.push(entry);
        }
        left += width + 2 * GAP;
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::super::png::decode;
    use super::super::{Scale, Series};
    use super::*;

    fn chart(points: Vec<(f64, f64)>, name: &str) -> Chart<'static> {
        let series = Series { name: name.to_owned(), points, mark: SeriesStyle::Line, color: 2 };
        let (x_scale, y_scale) = (Scale::Linear, Scale::Linear);
        Chart { x_words: "step", y_words: "", x_scale, y_scale, series: vec![series] }
    }

    fn titled(chart: Chart<'static>) -> TitledChart<'static> {
        TitledChart { heading: "", title: "reward", chart }
    }

    /// The middle row of the pixels of color 2 in every column that has some, by column.
    fn middles(file: &[u8]) -> Vec<(f64, f64)> {
        let ((width, height), pixels) = decode(file);
        let at = |x: u32, y: u32| &pixels[3 * (y * width + x) as usize..][..3];
        let of_column = |x: u32| {
            let rows: Vec<f64> =
                (0..height).filter(|y| at(x, *y) == [0x00, 0x55, 0xa4]).map(f64::from).collect();
            let mean = rows.iter().sum::<f64>() / rows.len() as f64;
            (!rows.is_empty()).then_some((f64::from(x), mean))
        };
        (0..width).filter_map(of_column).collect()
    }

    #[test]
    fn a_curve_is_where_its_numbers_are() {
        let points = vec![(0.0, 1.0), (10.0, 3.0), (30.0, -1.0), (40.0, 1.0)];
        let curve = middles(&sheet(&[titled(chart(points.clone(), ""))]));
        let (left, right) = (curve[0].0, curve[curve.len() - 1].0);
        assert!(right - left > 400.0, "{left} to {right}");
        let x = |step: f64| left + step / 40.0 * (right - left);
        let row = |step: f64| curve.iter().min_by_key(|at| (at.0 - x(step)).abs() as i64).unwrap().1;
        let (top, bottom) = (row(10.0), row(30.0));
        assert!(bottom - top > 150.0, "{top} to {bottom}");
        let y = |value: f64| bottom + (value + 1.0) / 4.0 * (top - bottom);
        for (step, value) in points.into_iter().chain([(5.0, 2.0), (20.0, 1.0), (25.0, 0.0)]) {
            assert!((row(step) - y(value)).abs() <= 3.0, "step {step}: {} is not {}", row(step), y(value));
        }
    }

    #[test]
    fn rows_have_their_headings_and_legends_above_the_charts() {
        let line = || vec![(0.0, 0.0), (1.0, 1.0)];
        let size = |charts: &[TitledChart<'_>]| decode(&sheet(charts)).0;
        let one = size(&[titled(chart(line(), ""))]);
        let named = size(&[titled(chart(line(), "reward/mean of first"))]);
        assert_eq!((named.0, named.1), (one.0, one.1 + ENTRY.unsigned_abs()));
        let many: Vec<_> = (0..=COLUMNS).map(|_| titled(chart(line(), ""))).collect();
        assert_eq!(size(&many).0, (2 * MARGIN + COLUMNS as i32 * CHART.0).unsigned_abs());
        let headed = TitledChart { heading: "Reward", ..titled(chart(line(), "")) };
        assert_eq!(size(&[headed]).1, one.1 + HEADING.unsigned_abs());
        // No number at all, and a single one.
        assert_eq!(size(&[titled(chart(Vec::new(), "")), titled(chart(vec![(3.0, 2.0)], ""))]).1, one.1);
    }
}
