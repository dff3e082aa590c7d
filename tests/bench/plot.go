package main

import (
	"bytes"
	"cmp"
	"encoding/csv"
	"errors"
	"image/color"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

var (
	blue  = color.RGBA{0x1b, 0x6c, 0xa8, 0xff}
	green = color.RGBA{0x2e, 0x9e, 0x5b, 0xff}
	red   = color.RGBA{0xc0, 0x39, 0x2b, 0xff}

	dashed = []vg.Length{vg.Points(6), vg.Points(3)}
)

// The opponents that are drawn, each with its colour in all plots; dashed is flushed to disk. The tables of the page
// have all opponents: more lines than these cannot be told apart.
var lines = []struct {
	opponent, label string
	colour          color.Color
	dashes          []vg.Length
}{
	{"combined-noflush", "combined", blue, nil},
	{"combined-flush", "combined, flushed", blue, dashed},
	{"plain-noflush", "plain calls", green, nil},
	{"redis", "redis_rate", red, nil},
	{"redis-aof", "redis_rate, appendfsync always", red, dashed},
}

func drawn() (opponents []string) {
	for _, l := range lines {
		opponents = append(opponents, l.opponent)
	}
	return opponents
}

const (
	plotWidth   = 26 * vg.Centimeter
	plotHeight  = 11 * vg.Centimeter
	legendWidth = 9.5 * vg.Centimeter
	margin      = vg.Centimeter / 2
	textSize    = vg.Length(12)
)

// newPlot has a grid, and its ordinate begins at 0.
func newPlot(title, abscissa string) *plot.Plot {
	p := plot.New()
	p.Title.Text, p.X.Label.Text = title, abscissa
	p.Y.Min, p.Y.Tick.Marker = 0, plot.TickerFunc(roundTicks)
	p.Add(plotter.NewGrid())
	return p
}

// plots draws what the page shows. The names of the files end in that of the processor, if it has one.
func (r *report) plots(dir, suffix string) error {
	return errors.Join(
		r.plot(filepath.Join(dir, "throughput-uniform"+suffix+".svg"), "Decisions per second, 100,000 keys (more is better)", "uniform", rate, 1),
		r.plot(filepath.Join(dir, "throughput-hot"+suffix+".svg"), "Decisions per second, one key (more is better)", "hot", rate, 1),
		r.plot(filepath.Join(dir, "p99-uniform"+suffix+".svg"), "99th percentile in milliseconds, 100,000 keys (less is better)", "uniform", p99, 1e-3))
}

// plot draws the lines that were measured, and nothing when there is none. The legend has them in the order in which
// they end, from top to bottom.
func (r *report) plot(file, title, keys, metric string, scale float64) error {
	p, legend, callers := newPlot(title, "callers at a time"), plot.NewLegend(), plot.ConstantTicks{}
	p.Title.TextStyle.Font.Size, p.Title.Padding = textSize+2, vg.Points(10)
	for _, style := range []*text.Style{&p.X.Label.TextStyle, &p.X.Tick.Label, &p.Y.Tick.Label, &legend.TextStyle} {
		style.Font.Size = textSize
	}
	for _, n := range []int{1, 16, 64, 256} {
		callers = append(callers, plot.Tick{Value: float64(n), Label: strconv.Itoa(n)})
	}
	p.X.Scale, p.X.Tick.Marker = plot.LogScale{}, callers
	legend.Top, legend.Left, legend.Padding, legend.ThumbnailWidth = true, true, vg.Points(6), vg.Points(30)

	type drawn struct {
		label string
		last  float64
		line  *plotter.Line
	}
	var all []drawn
	for _, l := range lines {
		var points plotter.XYs
		for _, tick := range callers {
			if value, ok := r.find(cellName(l.opponent, keys, int(tick.Value)) + "/" + metric); ok {
				points = append(points, plotter.XY{X: tick.Value, Y: value * scale})
			}
		}
		if len(points) < 2 {
			continue
		}
		line, dots, err := plotter.NewLinePoints(points)
		if err != nil {
			return err
		}
		line.Color, line.Dashes, line.Width = l.colour, l.dashes, vg.Points(2)
		dots.Color, dots.Shape, dots.Radius = l.colour, draw.CircleGlyph{}, vg.Points(3)
		p.Add(line, dots)
		all = append(all, drawn{l.label, points[len(points)-1].Y, line})
	}
	if len(all) == 0 {
		return nil
	}
	slices.SortFunc(all, func(a, b drawn) int { return cmp.Compare(b.last, a.last) })
	for _, d := range all {
		legend.Add(d.label, d.line)
	}
	svg, page := blank(plotHeight)
	p.Draw(draw.Crop(page, margin, -legendWidth, margin, -margin)) // the legend is beside it, where it covers no line
	legend.Draw(draw.Crop(page, plotWidth-legendWidth+margin, 0, 0, -3*margin))
	return write(svg, file)
}

// plotSoak draws each column of the samples of a soak by its first, the minutes: two plots in a row.
func plotSoak(file, results string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	samples, err := csv.NewReader(bytes.NewReader(text)).ReadAll()
	if err != nil {
		return err
	}
	if len(samples) < 3 {
		return errors.New("a soak has more samples than " + file)
	}
	names := samples[0][1:]
	rows := make([][]*plot.Plot, (len(names)+1)/2)
	for i := range rows {
		rows[i] = make([]*plot.Plot, 2)
	}
	for i, name := range names {
		var points plotter.XYs
		for _, sample := range samples[1:] {
			points = append(points, plotter.XY{X: number(sample[0]), Y: number(sample[i+1])})
		}
		curve, err := plotter.NewLine(points)
		if err != nil {
			return err
		}
		curve.Color, curve.Width = blue, vg.Points(1.5)
		rows[i/2][i%2] = newPlot(name, "minutes")
		rows[i/2][i%2].Add(curve)
	}
	svg, page := blank(vg.Length(len(rows)) * plotHeight / 2)
	tiles := draw.Tiles{Rows: len(rows), Cols: 2, PadX: margin, PadY: margin, PadTop: margin, PadBottom: margin, PadLeft: margin, PadRight: margin}
	for i, canvases := range plot.Align(rows, tiles, page) {
		for j, p := range rows[i] {
			if p != nil {
				p.Draw(canvases[j])
			}
		}
	}
	return write(svg, filepath.Join(results, "soak.svg"))
}

// blank is a white page.
func blank(height vg.Length) (*vgsvg.Canvas, draw.Canvas) {
	svg := vgsvg.New(plotWidth, height)
	page := draw.New(svg)
	page.SetColor(color.White)
	page.Fill(page.Path())
	return svg, page
}

// write puts a picture into one line: nobody reads it, or compares it line by line.
func write(svg *vgsvg.Canvas, file string) error {
	var text bytes.Buffer
	if _, err := svg.WriteTo(&text); err != nil {
		return err
	}
	return os.WriteFile(file, append(bytes.ReplaceAll(bytes.TrimSpace(text.Bytes()), []byte("\n"), []byte(" ")), '\n'), 0o644)
}

// roundTicks are the multiples of 1, 2 or 5 times a power of ten, at most seven of them.
func roundTicks(_, high float64) (ticks []plot.Tick) {
	for power := 1.0; ; power *= 10 {
		for _, step := range []float64{power, 2 * power, 5 * power} {
			if high/step > 6 {
				continue
			}
			for value := 0.0; value <= high; value += step {
				ticks = append(ticks, plot.Tick{Value: value, Label: thousands(value)})
			}
			return ticks
		}
	}
}
