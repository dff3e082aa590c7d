package tests

import (
	"image/color"
	"os"
	"path/filepath"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// A soakLine is one line of the plot.
type soakLine struct {
	name, unit string
	of         func(soakSample) float64
	bound      float64 // it should not grow to more than so many times what it was; 0: it should not sag
	colour     color.Color
}

var (
	blue   = color.RGBA{0x1b, 0x6c, 0xa8, 0xff}
	orange = color.RGBA{0xe6, 0x7e, 0x22, 0xff}

	soakPanels = [][]soakLine{
		{
			{"answers", "a second", func(s soakSample) float64 { return s.rate }, 0, blue},
		},
		{
			{"tables", "MB", func(s soakSample) float64 { return s.tables }, 1.5, blue},
			{"indexes", "MB", func(s soakSample) float64 { return s.indexes }, 1.5, orange},
		},
		{
			{"memory of the backends", "MB", func(s soakSample) float64 { return s.backends }, 1.2, blue},
			{"heap of the client", "MB", func(s soakSample) float64 { return s.heap }, 1.2, orange},
		},
	}
)

type soakQuarter struct{ most, mean float64 }

func (l soakLine) byQuarter(samples []soakSample) (quarters [4]soakQuarter) {
	for i := range quarters {
		part := samples[i*len(samples)/4 : (i+1)*len(samples)/4]
		for _, s := range part {
			quarters[i].most = max(quarters[i].most, l.of(s))
			quarters[i].mean += l.of(s) / float64(len(part))
		}
	}
	return quarters
}

// drawSoak draws one panel below the other.
func drawSoak(file string, samples []soakSample) error {
	const width, height = 26 * vg.Centimeter, 24 * vg.Centimeter
	var panels [][]*plot.Plot
	for _, lines := range soakPanels {
		p := plot.New()
		p.Y.Min, p.X.Label.Text, p.Y.Label.Text = 0, "minutes", lines[0].unit
		p.Legend.Top, p.Legend.Left, p.Legend.Padding = true, true, vg.Points(2)
		p.Add(plotter.NewGrid())
		for _, l := range lines {
			var points plotter.XYs
			for _, s := range samples[1:] { // the first has no rate
				points = append(points, plotter.XY{X: s.at.Minutes(), Y: l.of(s)})
			}
			line, err := plotter.NewLine(points)
			if err != nil {
				return err
			}
			line.Color, line.Width = l.colour, vg.Points(1.5)
			p.Add(line)
			p.Legend.Add(l.name, line)
		}
		p.Y.Max *= 1.3 // room for the legend
		panels = append(panels, []*plot.Plot{p})
	}
	svg := vgsvg.New(width, height)
	page := draw.New(svg)
	page.SetColor(color.White)
	page.Fill(page.Path())
	tiles := draw.Tiles{Rows: len(panels), Cols: 1, PadY: vg.Centimeter}
	for i, row := range plot.Align(panels, tiles, page) {
		panels[i][0].Draw(row[0])
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return err
	}
	out, err := os.Create(file)
	if err != nil {
		return err
	}
	defer out.Close()
	_, err = svg.WriteTo(out)
	return err
}
