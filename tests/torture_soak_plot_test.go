package tests

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"
)

// A soakLine is one line of the plot.
type soakLine struct {
	name, unit string
	of         func(soakSample) float64
	bound      float64 // it should not grow to more than so many times what it was; 0: it should not sag
}

var soakPanels = [][]soakLine{
	{{"answers", "a second", func(s soakSample) float64 { return s.rate }, 0}},
	{
		{"tables", "MB", func(s soakSample) float64 { return s.tables }, 1.5},
		{"indexes", "MB", func(s soakSample) float64 { return s.indexes }, 1.5},
	},
	{
		{"memory of the backends", "MB", func(s soakSample) float64 { return s.backends }, 1.2},
		{"heap of the client", "MB", func(s soakSample) float64 { return s.heap }, 1.2},
	},
}

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

// drawSoak draws one panel below the other. The module tests/bench has the program, and its dependencies.
func drawSoak(file string, samples []soakSample) error {
	type point struct{ X, Y float64 }
	type line struct {
		Name, Unit string
		Points     []point
	}
	var panels [][]line
	for _, lines := range soakPanels {
		var panel []line
		for _, l := range lines {
			drawn := line{Name: l.name, Unit: l.unit}
			for _, s := range samples[1:] { // the first has no rate
				drawn.Points = append(drawn.Points, point{s.at.Minutes(), l.of(s)})
			}
			panel = append(panel, drawn)
		}
		panels = append(panels, panel)
	}
	encoded, err := json.Marshal(panels)
	if err != nil {
		return err
	}
	path, err := filepath.Abs(file)
	if err != nil {
		return err
	}
	cmd := exec.Command("go", "run", "./panels", path)
	cmd.Dir, cmd.Stdin = "bench", bytes.NewReader(encoded)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%w\n%s", err, out)
	}
	return nil
}
