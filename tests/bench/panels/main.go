// Command panels draws lines over minutes, in panels one below the other. It reads the panels from
// standard input, as JSON, and writes an SVG:
//
//	go run ./panels FILE < panels.json
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"image/color"
	"io"
	"os"
	"path/filepath"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// A line is one of a panel. All lines of a panel have the unit of the first.
type line struct {
	Name, Unit string
	Points     plotter.XYs
}

// colours are those of a panel's lines, in turn.
var colours = []color.Color{
	color.RGBA{0x1b, 0x6c, 0xa8, 0xff}, // blue
	color.RGBA{0xe6, 0x7e, 0x22, 0xff}, // orange
}

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: panels FILE < panels.json")
		os.Exit(2)
	}
	if err := run(os.Stdin, os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "panels:", err)
		os.Exit(1)
	}
}

func run(in io.Reader, file string) error {
	var panels [][]line
	if err := json.NewDecoder(in).Decode(&panels); err != nil {
		return err
	}
	var plots [][]*plot.Plot
	for _, lines := range panels {
		p, err := panel(lines)
		if err != nil {
			return err
		}
		plots = append(plots, []*plot.Plot{p})
	}
	const width, height = 26 * vg.Centimeter, 24 * vg.Centimeter
	svg := vgsvg.New(width, height)
	page := draw.New(svg)
	page.SetColor(color.White)
	page.Fill(page.Path())
	tiles := draw.Tiles{Rows: len(plots), Cols: 1, PadY: vg.Centimeter}
	for i, row := range plot.Align(plots, tiles, page) {
		plots[i][0].Draw(row[0])
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return err
	}
	out, err := os.Create(file)
	if err != nil {
		return err
	}
	_, err = svg.WriteTo(out)
	return errors.Join(err, out.Close())
}

func panel(lines []line) (*plot.Plot, error) {
	p := plot.New()
	p.Y.Min, p.X.Label.Text, p.Y.Label.Text = 0, "minutes", lines[0].Unit
	p.Legend.Top, p.Legend.Left, p.Legend.Padding = true, true, vg.Points(2)
	p.Add(plotter.NewGrid())
	for i, l := range lines {
		drawn, err := plotter.NewLine(l.Points)
		if err != nil {
			return nil, err
		}
		drawn.Color, drawn.Width = colours[i%len(colours)], vg.Points(1.5)
		p.Add(drawn)
		p.Legend.Add(l.Name, drawn)
	}
	p.Y.Max *= 1.3 // room for the legend
	return p, nil
}
