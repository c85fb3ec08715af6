//! Curves as a chart: an SVG file, a part of a PNG file, or characters in the terminal.
//!
//! - `text`: the same chart in plain ASCII
//! - `sheet`: several charts on one canvas; `canvas`: its pixels; `letters`: its font; `png`: its file
//!
//! Invariant: any browser or terminal shows it. Points that a logarithmic axis cannot show are skipped.

mod canvas;
mod letters;
pub(crate) mod png;
pub(crate) mod sheet;
mod text;

use std::ops::Range;

use plotters::coord::Shift;
use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::drawing::DrawingAreaErrorKind;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// Width and height of the picture, pixels.
const SIZE: (u32, u32) = (720, 420);

/// The font of numbers beside points.
const FONT: (&str, i32) = (FAMILY, 13);
/// The family of all fonts.
const FAMILY: &str = "sans-serif";

/// Radius of points, pixels.
const RADIUS: i32 = 3;

/// Colors of series, by their number.
const COLORS: [RGBColor; 9] = [
    BLACK,
    RGBColor(0xc1, 0x27, 0x2d),
    RGBColor(0x00, 0x55, 0xa4),
    RGBColor(0x2e, 0x7d, 0x32),
    RGBColor(0x8e, 0x44, 0xad),
    RGBColor(0xb9, 0x77, 0x0e),
    RGBColor(0x00, 0x8b, 0x8b),
    RGBColor(0xd8, 0x1b, 0x78),
    RGBColor(0x6d, 0x4c, 0x41),
];
/// Share of an axis below which a number is the rounding error of 0.
const TICK: f64 = 1e-9;
/// Share of a color that a faint line has.
const FAINT: f64 = 0.4;

/// How a series is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeriesStyle {
    /// A line with its points, each of which carries its numbers.
    Measured,
    /// A line alone.
    Line,
    /// A line that others stand before.
    Faint,
    /// Filled points.
    Dots,
    /// Hollow points.
    Rings,
}

/// The scale of an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// By difference.
    Linear,
    /// By ratio; values above 0.
    Logarithmic,
}

/// A series of points.
#[derive(Clone, Debug)]
pub struct Series {
    /// The text in the legend; empty for none.
    pub name: String,
    /// (x, y) in ascending order of x.
    pub points: Vec<(f64, f64)>,
    /// Its style.
    pub mark: SeriesStyle,
    /// Which of the colors, from 0; series that belong together share one.
    pub color: usize,
}

/// A chart.
#[derive(Clone, Debug)]
pub struct Chart<'a> {
    /// Label of the x axis.
    pub x_words: &'a str,
    /// Label of the y axis.
    pub y_words: &'a str,
    /// Scale of the x axis.
    pub x_scale: Scale,
    /// Scale of the y axis.
    pub y_scale: Scale,
    /// The series.
    pub series: Vec<Series>,
}

impl Chart<'_> {
    /// The chart as an SVG picture.
    #[must_use]
    pub fn svg(&self) -> String {
        let mut out = String::new();
        let area = SVGBackend::with_string(&mut out, SIZE).into_drawing_area();
        let drawn = area.fill(&WHITE).and_then(|()| self.draw(&area, ChartLook::SVG));
        drawn.and_then(|()| area.present()).expect("a string takes everything that is drawn");
        drop(area);
        out
    }

    /// Draws the chart on an area.
    fn draw<D: DrawingBackend>(
        &self,
        area: &DrawingArea<D, Shift>,
        look: ChartLook,
    ) -> Result<(), DrawingAreaErrorKind<D::ErrorType>> {
        let (xs, ys) = self.axes();
        let (xs, ys) = (xs.range(), ys.widened(look.y_margin).range());
        let look = ChartLook { tick: TICK * (ys.end - ys.start), ..look };
        match (self.x_scale, self.y_scale) {
            (Scale::Linear, Scale::Linear) => self.draw_over(area, look, xs, ys),
            (Scale::Linear, Scale::Logarithmic) => self.draw_over(area, look, xs, ys.log_scale()),
            (Scale::Logarithmic, Scale::Linear) => self.draw_over(area, look, xs.log_scale(), ys),
            (Scale::Logarithmic, Scale::Logarithmic) => {
                self.draw_over(area, look, xs.log_scale(), ys.log_scale())
            }
        }
    }

    /// Draws the chart over these axes.
    fn draw_over<D, X, Y>(
        &self,
        area: &DrawingArea<D, Shift>,
        look: ChartLook,
        xs: X,
        ys: Y,
    ) -> Result<(), DrawingAreaErrorKind<D::ErrorType>>
    where
        D: DrawingBackend,
        X: AsRangedCoord<Value = f64>,
        X::CoordDescType: ValueFormatter<f64>,
        Y: AsRangedCoord<Value = f64>,
        Y::CoordDescType: ValueFormatter<f64>,
    {
        let mut builder = ChartBuilder::on(area);
        let [below, left] = look.label_areas;
        builder.margin(look.margin).x_label_area_size(below).y_label_area_size(left);
        let mut chart = builder.build_cartesian_2d(xs, ys)?;
        let mut mesh = chart.configure_mesh();
        mesh.disable_x_mesh().x_desc(self.x_words).y_desc(self.y_words).x_labels(6).y_labels(6);
        mesh.label_style((FAMILY, look.text));
        if !look.fine_grid {
            mesh.light_line_style(TRANSPARENT);
        }
        let of_y = |y: &f64| number(if y.abs() < look.tick { 0.0 } else { *y });
        mesh.x_label_formatter(&|x| number(*x)).y_label_formatter(&of_y).draw()?;
        for series in &self.series {
            let share = if series.mark == SeriesStyle::Faint { FAINT } else { 1.0 };
            let color = COLORS[series.color % COLORS.len()].mix(share);
            let stroke = color.stroke_width(look.line);
            let points = || self.shown(series).copied();
            let fill = if series.mark == SeriesStyle::Rings { stroke } else { color.filled() };
            let circles = points().map(|point| Circle::new(point, RADIUS, fill));
            let drawn = match series.mark {
                SeriesStyle::Line | SeriesStyle::Faint => {
                    chart.draw_series(LineSeries::new(points(), stroke))?
                }
                SeriesStyle::Dots | SeriesStyle::Rings => chart.draw_series(circles)?,
                SeriesStyle::Measured => {
                    chart.draw_series(LineSeries::new(points(), stroke))?;
                    let above = TextStyle::from(FONT).pos(Pos::new(HPos::Center, VPos::Bottom));
                    chart.draw_series(points().map(|(x, y)| {
                        let label = Text::new(format!("{x}: {y:.3}"), (0, -2 * RADIUS), above.clone());
                        EmptyElement::at((x, y)) + label
                    }))?;
                    chart.draw_series(circles)?
                }
            };
            if !series.name.is_empty() {
                let sign = move |(x, y)| PathElement::new([(x, y), (x + 16, y)], color);
                drawn.label(series.name.clone()).legend(sign);
            }
        }
        if self.series.iter().any(|series| !series.name.is_empty()) {
            let mut legend = chart.configure_series_labels();
            legend.position(SeriesLabelPosition::UpperLeft).draw()?;
        }
        Ok(())
    }

    /// The points of `series` that can stand on the axes.
    fn shown<'a>(&self, series: &'a Series) -> impl Iterator<Item = &'a (f64, f64)> {
        let (x_scale, scale) = (self.x_scale, self.y_scale);
        let fits = |scale: Scale, value: f64| value.is_finite() && (scale == Scale::Linear || value > 0.0);
        series.points.iter().filter(move |(x, y)| fits(x_scale, *x) && fits(scale, *y))
    }

    /// Both axes over all points.
    fn axes(&self) -> (Axis, Axis) {
        let points = || self.series.iter().flat_map(|series| self.shown(series));
        let xs = Axis::over(points().map(|point| point.0), self.x_scale);
        (xs, Axis::over(points().map(|point| point.1), self.y_scale))
    }
}

/// Sizes of a chart, pixels.
#[derive(Clone, Copy, Debug)]
struct ChartLook {
    /// The font of labels.
    text: i32,
    /// Width of lines.
    line: u32,
    /// Space around the chart.
    margin: i32,
    /// Height of the labels below, width of those at the left.
    label_areas: [i32; 2],
    /// Share of the y axis that stays free above and below.
    y_margin: f64,
    /// Whether the grid has lines between its numbers.
    fine_grid: bool,
    /// Numbers of the y axis below this size are 0.
    tick: f64,
}

impl ChartLook {
    const SVG: Self = Self {
        text: 12,
        line: 1,
        margin: 20,
        label_areas: [40, 60],
        y_margin: 0.0,
        fine_grid: true,
        tick: 0.0,
    };
}

/// An axis from the smallest to the largest value.
#[derive(Clone, Copy, Debug)]
struct Axis {
    from: f64,
    to: f64,
    scale: Scale,
}

impl Axis {
    fn over(values: impl Iterator<Item = f64>, scale: Scale) -> Self {
        let start = Self { from: f64::INFINITY, to: f64::NEG_INFINITY, scale };
        values.fold(start, |axis, value| Self { from: axis.from.min(value), to: axis.to.max(value), scale })
    }

    /// The axis with a share of its length added at both ends.
    fn widened(self, share: f64) -> Self {
        match self.scale {
            _ if self.from >= self.to => self,
            Scale::Linear => {
                let more = share * (self.to - self.from);
                Self { from: self.from - more, to: self.to + more, ..self }
            }
            Scale::Logarithmic => {
                let more = (self.to / self.from).powf(share);
                Self { from: self.from / more, to: self.to * more, ..self }
            }
        }
    }

    /// Where `value` lies, from 0 to 1; in the middle if there is only one value.
    fn share(self, value: f64) -> f64 {
        match self.scale {
            // Also where there is no value at all.
            _ if self.from >= self.to => 0.5,
            Scale::Linear => (value - self.from) / (self.to - self.from),
            Scale::Logarithmic => (value / self.from).ln() / (self.to / self.from).ln(),
        }
    }

    /// The ends of the axis in a picture, where a single value stands in the middle.
    fn range(self) -> Range<f64> {
        match self.scale {
            _ if self.from < self.to => self.from..self.to,
            // There is no value at all.
            _ if self.from > self.to => 1.0..10.0,
            Scale::Linear => self.from - 0.5..self.from + 0.5,
            Scale::Logarithmic => 0.5 * self.from..2.0 * self.from,
        }
    }
}

/// A number in at most four digits, with an exponent where it is long.
#[must_use]
pub fn number(value: f64) -> String {
    let size = value.abs();
    if value == 0.0 {
        "0".to_owned()
    } else if (1e-3..1e5).contains(&size) {
        let places = (3 - size.log10().floor() as i32).clamp(0, 6) as usize;
        let text = format!("{value:.places$}");
        if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
    } else {
        format!("{value:.2e}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(points: &[(f64, f64)], mark: SeriesStyle, y_scale: Scale) -> Chart<'static> {
        let series = vec![Series { name: String::new(), points: points.to_vec(), mark, color: 0 }];
        Chart { x_words: "batch", y_words: "ms", x_scale: Scale::Logarithmic, y_scale, series }
    }

    /// The values of an attribute of the elements of one kind.
    fn attributes<'a>(svg: &'a str, element: &str, name: &str) -> Vec<&'a str> {
        let (element, name) = (format!("<{element} "), format!(" {name}=\""));
        let lines = svg.lines().filter(|line| line.starts_with(&element));
        lines.map(|line| line.split(&name).nth(1).unwrap().split('"').next().unwrap()).collect()
    }

    #[test]
    fn points_lie_between_the_corners_in_logarithmic_distance() {
        let points = [(1.0, 8.0), (16.0, 2.0), (256.0, 0.5)];
        let svg = chart(&points, SeriesStyle::Measured, Scale::Logarithmic).svg();
        for name in ["cx", "cy"] {
            let places: Vec<i32> =
                attributes(&svg, "circle", name).iter().map(|place| place.parse().unwrap()).collect();
            let [first, middle, last] = places[..] else { panic!("{svg}") };
            assert!((last - first - 2 * (middle - first)).abs() <= 1 && last - first > 300, "{places:?}");
        }
        for shown in ["\n1: 8.000\n", "\n256: 0.500\n", "\nbatch\n", "\nms\n", "\n100\n"] {
            assert!(svg.contains(shown), "{shown}: {svg}");
        }
        let one = chart(&[(4.0, 1.0)], SeriesStyle::Measured, Scale::Logarithmic).svg();
        assert_eq!(attributes(&one, "circle", "cx").len(), 1, "{one}");
    }

    #[test]
    fn a_linear_axis_has_round_ticks_and_names_are_escaped() {
        let mut chart = chart(&[(1.0, 0.13), (10.0, 0.33), (100.0, 0.53)], SeriesStyle::Rings, Scale::Linear);
        chart.series[0].name = "a<b".to_owned();
        let svg = chart.svg();
        assert_eq!(attributes(&svg, "circle", "fill"), ["none"; 3], "{svg}");
        for shown in ["\n0.2\n", "\n0.3\n", "\n0.5\n", "\n10\n", "\n100\n", "a&lt;b"] {
            assert!(svg.contains(shown), "{shown}: {svg}");
        }
        assert!(!chart.svg().contains("NaN"));
        chart.series.clear();
        assert!(!chart.svg().contains("NaN") && !chart.svg().contains("inf"));
    }

    #[test]
    fn numbers_are_short() {
        let pairs = [
            (0.645, "0.645"),
            (3000.0, "3000"),
            (1.7, "1.7"),
            (123_456.0, "1.23e5"),
            (0.0, "0"),
            (-0.25, "-0.25"),
        ];
        for (value, text) in pairs {
            assert_eq!(number(value), text);
        }
    }
}
