package main

import (
	"encoding/csv"
	"errors"
	"image/color"
	"os"
	"path/filepath"
	"strconv"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// plotSoak draws each column of the samples of a soak by its first, the minutes: two plots in a row.
func plotSoak(file, results string) error {
	in, err := os.Open(file)
	if err != nil {
		return err
	}
	defer in.Close()
	lines, err := csv.NewReader(in).ReadAll()
	if err != nil {
		return err
	}
	if len(lines) < 3 {
		return errors.New("a soak has more samples than " + file)
	}
	const inRow = 2
	names := lines[0][1:]
	rows := make([][]*plot.Plot, (len(names)+inRow-1)/inRow)
	for i, name := range names {
		points := make(plotter.XYs, len(lines)-1)
		for j, line := range lines[1:] {
			x, errX := strconv.ParseFloat(line[0], 64)
			y, errY := strconv.ParseFloat(line[i+1], 64)
			if err := errors.Join(errX, errY); err != nil {
				return err
			}
			points[j] = plotter.XY{X: x, Y: y}
		}
		curve, err := plotter.NewLine(points)
		if err != nil {
			return err
		}
		curve.Color, curve.Width = blue, vg.Points(1.5)
		p := plot.New()
		p.Title.Text, p.X.Label.Text, p.Y.Min, p.Y.Tick.Marker = name, "minutes", 0, plot.TickerFunc(roundTicks)
		p.Add(plotter.NewGrid(), curve)
		rows[i/inRow] = append(rows[i/inRow], p)
	}
	for len(rows[len(rows)-1]) < inRow {
		rows[len(rows)-1] = append(rows[len(rows)-1], nil)
	}
	svg := vgsvg.New(plotWidth, vg.Length(len(rows))*plotHeight/2)
	page := draw.New(svg)
	page.SetColor(color.White)
	page.Fill(page.Path())
	tiles := draw.Tiles{Rows: len(rows), Cols: inRow, PadX: margin, PadY: margin, PadTop: margin, PadBottom: margin, PadLeft: margin, PadRight: margin}
	for i, canvases := range plot.Align(rows, tiles, page) {
		for j, p := range rows[i] {
			if p != nil {
				p.Draw(canvases[j])
			}
		}
	}
	return write(svg, filepath.Join(results, "soak.svg"))
}
