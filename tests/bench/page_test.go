package main

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const performancePage = "../../docs/performance.md"

// No figure of the page is written by hand: make bench-page writes them.
func TestPage_HasTheFiguresOfTheResults(t *testing.T) {
	t.Parallel()
	all, err := readResults("results")
	require.NoError(t, err)
	page, err := os.ReadFile(performancePage)
	require.NoError(t, err)
	next, err := renewPage(string(page), all)
	require.NoError(t, err)
	require.Equal(t, next, string(page), "make bench-page")
	for name := range pageBlocks {
		require.Contains(t, string(page), "<!-- bench:"+name+" -->")
	}
}

// A row of the page whose measure is misspelt would never have a figure.
func TestPage_ShowsMeasuresThatThereAre(t *testing.T) {
	t.Parallel()
	var r report
	for _, m := range all() {
		r.Measures = append(r.Measures, result{Name: m.name, Value: 12345, Unit: m.unit})
	}
	r.Machine = map[string]string{"machine": "2 cores of a processor, 24 GB"}
	page, err := os.ReadFile(performancePage)
	require.NoError(t, err)
	next, err := renewPage(string(page), []processor{{&r, "bench"}})
	require.NoError(t, err)
	require.NotContains(t, next, nothingMeasured)
	for line := range strings.Lines(next) {
		if strings.HasPrefix(line, "|") {
			dashes := strings.Count(line, "| – ")
			cells := strings.Count(line, "|") - 2
			require.True(t, dashes < cells, "no figure in %s", line)
		}
	}
	for _, block := range pageBlock.FindAllStringSubmatch(next, -1) {
		if block[2] == "summary" || block[2] == "distance" {
			continue
		}
		require.NotContains(t, block[3], "–", "in %s", block[2])
	}
}

func TestPage_RefusesBlocksThatNobodyWrites(t *testing.T) {
	t.Parallel()
	for _, page := range []string{"<!-- bench:unknown -->\n<!-- end -->\n", "<!-- bench:summary -->\n", "<!-- bench:Summary -->\n<!-- end -->\n"} {
		_, err := renewPage(page, nil)
		require.Error(t, err, page)
	}
}

// What nobody has measured has no row and no column.
func TestPage_LeavesOutWhatWasNotMeasured(t *testing.T) {
	t.Parallel()
	require.Equal(t, nothingMeasured, pageTable([]string{"", "a"}, [][]string{{"row", "–"}}))
	require.Equal(t, "| x | b |\n|---|---:|\n| two | 3 |\n", pageTable([]string{"x", "a", "b"}, [][]string{{"one", "–", "–"}, {"two", "–", "3"}}))
}
