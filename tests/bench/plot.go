package main

import (
	"image/color"
	"math"
	"os"
	"path/filepath"
	"strconv"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// The kind of an opponent is its colour in all plots; what flushes is dashed, what is not kept dotted.
var styles = map[string]struct {
	colour color.Color
	dashes []vg.Length
}{
	"combined-noflush":    {blue, nil},
	"combined-flush":      {blue, dashed},
	"combined-ephemeral":  {blue, dotted},
	"plain-noflush":       {green, nil},
	"plain-flush":         {green, dashed},
	"plain-ephemeral":     {green, dotted},
	"redis":               {red, nil},
	"redis-aof":           {red, dashed},
	"redis-pipelined":     {orange, nil},
	"redis-aof-pipelined": {orange, dashed},
	"statements":          {grey, nil},
	"serializable":        {black, nil},
}

var (
	blue   = color.RGBA{0x1b, 0x6c, 0xa8, 0xff}
	green  = color.RGBA{0x2e, 0x9e, 0x5b, 0xff}
	red    = color.RGBA{0xc0, 0x39, 0x2b, 0xff}
	orange = color.RGBA{0xe6, 0x7e, 0x22, 0xff}
	grey   = color.RGBA{0x7f, 0x8c, 0x8d, 0xff}
	black  = color.RGBA{0x2c, 0x3e, 0x50, 0xff}

	dashed = []vg.Length{vg.Points(6), vg.Points(3)}
	dotted = []vg.Length{vg.Points(1.5), vg.Points(2.5)}
)

const (
	plotWidth   = 26 * vg.Centimeter
	plotHeight  = 13 * vg.Centimeter
	legendWidth = 8.5 * vg.Centimeter
)

// plots draws throughput and the 99th percentile by callers.
func (r *report) plots(dir string) error {
	for _, keys := range keyNames {
		title := keyTitles[keys]
		if err := r.plot(filepath.Join(dir, "throughput-"+keys+".svg"), title, "decisions per second", keys, rate, 1); err != nil {
			return err
		}
		if err := r.plot(filepath.Join(dir, "p99-"+keys+".svg"), title, "99th percentile in milliseconds", keys, p99, 1e-3); err != nil {
			return err
		}
	}
	return nil
}

// plot draws one line for each opponent, and nothing when no line was measured.
func (r *report) plot(file, title, axis, keys, metric string, scale float64) error {
	p, legend := plot.New(), plot.NewLegend()
	p.Title.Text = title
	p.X.Label.Text, p.Y.Label.Text = "callers", axis
	p.X.Scale, p.Y.Scale = plot.LogScale{}, plot.LogScale{}
	p.X.Tick.Marker, p.Y.Tick.Marker = plot.TickerFunc(callerTicks), plot.TickerFunc(logTicks)
	p.Add(plotter.NewGrid())
	legend.Top, legend.Left, legend.Padding = true, true, vg.Points(2)
	lines := 0
	for _, opponent := range byTitle() {
		var points plotter.XYs
		for _, callers := range callerCounts {
			if m := r.find(cellName(opponent.name, keys, callers) + "/" + metric); m != nil && m.Value > 0 {
				points = append(points, plotter.XY{X: float64(callers), Y: m.Value * scale})
			}
		}
		if len(points) < 2 {
			continue
		}
		line, dots, err := plotter.NewLinePoints(points)
		if err != nil {
			return err
		}
		style := styles[opponent.name]
		line.Color, line.Dashes, line.Width = style.colour, style.dashes, vg.Points(1.5)
		dots.Color, dots.Shape, dots.Radius = style.colour, draw.CircleGlyph{}, vg.Points(2)
		p.Add(line, dots)
		legend.Add(opponent.title, line, dots)
		lines++
	}
	if lines == 0 {
		return nil
	}
	return save(file, p, legend)
}

// save puts the legend beside the plot, where it covers no line.
func save(file string, p *plot.Plot, legend plot.Legend) error {
	svg := vgsvg.New(plotWidth, plotHeight)
	page := draw.New(svg)
	page.SetColor(color.White)
	page.Fill(page.Path())
	p.Draw(draw.Crop(page, 0, -legendWidth, 0, 0))
	legend.Draw(draw.Crop(page, plotWidth-legendWidth+vg.Points(10), 0, 0, -vg.Points(20)))
	out, err := os.Create(file)
	if err != nil {
		return err
	}
	defer out.Close()
	_, err = svg.WriteTo(out)
	return err
}

func callerTicks(_, _ float64) (ticks []plot.Tick) {
	for _, callers := range callerCounts {
		ticks = append(ticks, plot.Tick{Value: float64(callers), Label: strconv.Itoa(callers)})
	}
	return ticks
}

// logTicks are 1, 2 and 5 in each power of ten.
func logTicks(low, high float64) (ticks []plot.Tick) {
	for power := math.Pow(10, math.Floor(math.Log10(low))); power <= high; power *= 10 {
		for _, digit := range []float64{1, 2, 5} {
			if value := digit * power; value >= low && value <= high {
				ticks = append(ticks, plot.Tick{Value: value, Label: tickLabel(value)})
			}
		}
	}
	return ticks
}

func tickLabel(value float64) string {
	if value >= 1 {
		return thousands(value)
	}
	return figure(value)
}
