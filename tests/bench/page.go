package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// The page docs/performance.md is prose with blocks between comments, <!-- bench:NAME --> and <!-- end -->. What is in a block comes
// from the results of each processor, by the functions below. No figure is written by hand.

// A processor is the results of one, and the name of their files.
type processor struct {
	*report
	file string
}

// title is what its column is called.
func (p processor) title() string {
	_, name, _ := strings.Cut(p.Machine["machine"], " of ")
	name, _, _ = strings.Cut(name, ",")
	return strings.TrimSpace(strings.NewReplacer("(R)", "", "(TM)", "", " Processor", "").Replace(name))
}

// readResults returns those of a directory: bench.json first, whose plots are beside it.
func readResults(dir string) (all []processor, err error) {
	files, err := filepath.Glob(filepath.Join(dir, "bench*.json"))
	if err != nil {
		return nil, err
	}
	slices.SortFunc(files, func(a, b string) int {
		return strings.Compare(strings.TrimSuffix(a, ".json"), strings.TrimSuffix(b, ".json"))
	})
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		p := processor{new(report), strings.TrimSuffix(filepath.Base(file), ".json")}
		if err := json.Unmarshal(text, p.report); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		all = append(all, p)
	}
	if len(all) == 0 {
		return nil, errors.New("no results in " + dir)
	}
	return all, nil
}

var pageBlock = regexp.MustCompile(`(?s)(<!-- bench:([a-z]+) -->\n)(.*?)(<!-- end -->\n)`)

// renewPage returns a page with its blocks written anew.
func renewPage(page string, all []processor) (_ string, err error) {
	if strings.Count(page, "<!-- bench:") != len(pageBlock.FindAllString(page, -1)) {
		return "", errors.New("a block of the page does not end, or has a name of other than small letters")
	}
	page = pageBlock.ReplaceAllStringFunc(page, func(block string) string {
		part := pageBlock.FindStringSubmatch(block)
		write := pageBlocks[part[2]]
		if write == nil {
			err = errors.Join(err, fmt.Errorf("the page has a block %q, which nobody writes", part[2]))
			return block
		}
		return part[1] + write(all) + part[4]
	})
	return page, err
}

func rewritePage(file, results string) error {
	all, err := readResults(results)
	if err != nil {
		return err
	}
	page, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	next, err := renewPage(string(page), all)
	if err != nil {
		return err
	}
	return os.WriteFile(file, []byte(next), 0o644)
}

var pageBlocks = map[string]func([]processor) string{
	"machines": machines,
	"summary":  summary,
	"joint": figures("a request of three limits", byCallers, []pageRow{
		{"`Combiner.AcquireAll`, all or nothing", "joint-combined-noflush/uniform/*/rate"},
		{"Redis, one script over three keys, all or nothing", "joint-script/uniform/*/rate"},
		{"the same, pipelined", "joint-script-pipelined/uniform/*/rate"},
		{"redis_rate, its three calls in one pipeline: each by itself", "joint-redis/uniform/*/rate"},
	}),
	"keyed": figures("many keys", byCallers, []pageRow{
		{"combined", "combined-noflush/uniform/*/rate"},
		{"combined, each request with an idempotency key", "keyed-combined-noflush/uniform/*/rate"},
		{"plain", "plain-noflush/uniform/*/rate"},
		{"plain, each request with an idempotency key", "keyed-plain-noflush/uniform/*/rate"},
	}),
	"served": figures("many keys", byCallers, []pageRow{
		{"`pgratelimit serve` by gRPC", "served/grpc/*/rate"},
		{"`pgratelimit serve` by JSON", "served/json/*/rate"},
		{"gRPC alone: `pgratelimit serve` says that it is healthy", "served/health/*/rate"},
		{"Envoy's reference service by gRPC, on Redis", "served/envoy/*/rate"},
		{"a Combiner in the callers' process", "served/combiner/*/rate"},
		{"redis_rate in the callers' process", "served/redis/*/rate"},
	}),
	"node": figures("Node.js", byCallers, []pageRow{
		{"`ratelimit_acquire`, many keys", "npm/pgratelimit/uniform/*/rate"},
		{"rate-limiter-flexible, many keys", "npm/rate-limiter-flexible/uniform/*/rate"},
		{"`ratelimit_acquire`, one key", "npm/pgratelimit/hot/*/rate"},
		{"rate-limiter-flexible, one key", "npm/rate-limiter-flexible/hot/*/rate"},
	}),
	"versions": figures("64 callers, many keys", single, []pageRow{
		{"combined, PostgreSQL 15", "versions/15/combined/rate"},
		{"combined, PostgreSQL 18", "versions/18/combined/rate"},
		{"plain, PostgreSQL 15", "versions/15/plain/rate"},
		{"plain, PostgreSQL 18", "versions/18/plain/rate"},
	}),
	"processes": figures("64 callers in four processes, one key", single, []pageRow{
		{"leased", "processes/leaser/rate"},
		{"combined", "processes/combined/rate"},
		{"plain", "processes/plain/rate"},
		{"redis_rate", "processes/redis/rate"},
	}),
	"distance": figures("64 callers", byDistance, []pageRow{
		{"leased, one key", "leases/leaser*/hot/rate"},
		{"combined, one key", "leases/combined*/hot/rate"},
		{"redis_rate, one key", "leases/redis*/hot/rate"},
		{"redis_rate pipelined, one key", "leases/redis-pipelined*/hot/rate"},
		{"leased, many keys", "leases/leaser*/uniform/rate"},
		{"combined, many keys", "leases/combined*/uniform/rate"},
		{"redis_rate, many keys", "leases/redis*/uniform/rate"},
		{"redis_rate pipelined, many keys", "leases/redis-pipelined*/uniform/rate"},
	}),
	"spending": figures("16 clients of pgbench, many keys", single, []pageRow{
		{"acquire", "bare/acquire/rate"},
		{"reserve", "bare/reserved/rate"},
		{"enforce", "bare/enforced/rate"},
		{"acquire with an idempotency key", "bare/keyed/rate"},
		{"the same, and then settle", "bare/settled/rate"},
		{"insert a row", "bare/insert/rate"},
		{"insert a row into a guarded table", "bare/guarded/rate"},
	}),
	"costs": figures("ratio", single, []pageRow{
		{"acquire, to a bare update of one row", "acquire_to_bare_update"},
		{"acquire with an idempotency key, to one without", "keyed_to_unkeyed"},
		{"denial, to a bare select of one row", "denied_to_bare_select"},
		{"plain acquires by 64 clients on one key, to bare updates of that row", "hot_acquire_to_bare_update"},
		{"10 million buckets, to 10 thousand", "buckets_10m_to_10k"},
		{"beside clean-up, to without", "acquire_beside_cleanup"},
		{"combined on one key while an old snapshot is held for 60 s, to before", "hot_key_under_snapshot"},
		{"WAL of a denial, bytes", "wal_per_denial"},
	}),
	"redis": figures("", single, []pageRow{
		{"a lone caller of redis_rate, median in µs", "redis/uniform/1/p50"},
		{"a lone plain call, median in µs", "plain-noflush/uniform/1/p50"},
		{"64 callers, many keys: combined to redis_rate", "combined_64_many_keys_to_redis"},
		{"the same, p99", "combined_64_p99_to_redis"},
		{"256 callers, many keys: combined to redis_rate", "combined_256_many_keys_to_redis"},
		{"256 callers, one key: combined to redis_rate", "combined_256_hot_key_to_redis"},
	}),
	"cpu": figures("CPU microseconds of a decision", single, []pageRow{
		{"plain, server", "plain-noflush/uniform/256/cpu_server"},
		{"plain, client", "plain-noflush/uniform/256/cpu_client"},
		{"combined, server", "combined-noflush/uniform/256/cpu_server"},
		{"combined, client", "combined-noflush/uniform/256/cpu_client"},
	}),
	"space": figures("", single, []pageRow{
		{"bytes of a bucket", "bucket_bytes"},
		{"the same, to the formula", "bucket_bytes_to_formula"},
		{"bytes of a remembered grant", "remembered_bytes"},
		{"the same, to the formula", "remembered_bytes_to_formula"},
	}),
}

// A pageRow is a title and the measure that it shows, with * where the columns differ.
type pageRow struct{ title, measure string }

// A pageColumn is there for each processor. Its title goes before that of the processor, its part in place of the * of a row.
type pageColumn struct{ title, part string }

var (
	single     = []pageColumn{{}}
	byCallers  = []pageColumn{{"64 callers, ", "64"}, {"256 callers, ", "256"}}
	byDistance = []pageColumn{{"here, ", ""}, {"1 ms away, ", "-1ms"}, {"5 ms away, ", "-5ms"}}
)

const nothingMeasured = "_Not measured yet._\n"

// text is a figure of a processor, or a dash.
func (p processor) text(measure string) string {
	m := p.find(measure)
	switch {
	case m == nil:
		return "–"
	case m.Unit == "1/s":
		return thousands(m.Value)
	default:
		return figure(m.Value)
	}
}

// pageTable writes a table without the rows and columns that nobody has measured, but for their titles.
func pageTable(head []string, rows [][]string) string {
	rows = slices.DeleteFunc(rows, func(row []string) bool {
		return !slices.ContainsFunc(row[1:], func(cell string) bool { return cell != "–" })
	})
	if len(rows) == 0 {
		return nothingMeasured
	}
	for column := len(head) - 1; column > 0; column-- {
		if !slices.ContainsFunc(rows, func(row []string) bool { return row[column] != "–" }) {
			head = slices.Delete(slices.Clone(head), column, column+1)
			for i := range rows {
				rows[i] = slices.Delete(slices.Clone(rows[i]), column, column+1)
			}
		}
	}
	var b strings.Builder
	fmt.Fprintf(&b, "| %s |\n|---|%s\n", strings.Join(head, " | "), strings.Repeat("---:|", len(head)-1))
	for _, row := range rows {
		fmt.Fprintf(&b, "| %s |\n", strings.Join(row, " | "))
	}
	return b.String()
}

// figures has a measure in each row, and the columns of one processor after those of another.
func figures(title string, columns []pageColumn, rows []pageRow) func([]processor) string {
	return func(all []processor) string {
		head, table := []string{title}, [][]string{}
		for _, p := range all {
			for _, c := range columns {
				head = append(head, c.title+p.title())
			}
		}
		for _, row := range rows {
			line := []string{row.title}
			for _, p := range all {
				for _, c := range columns {
					line = append(line, p.text(strings.ReplaceAll(row.measure, "*", c.part)))
				}
			}
			table = append(table, line)
		}
		return pageTable(head, table)
	}
}

// machines tells what was measured on, and when.
func machines(all []processor) string {
	var b strings.Builder
	for _, p := range all {
		note := ""
		if p.Note != "" {
			note = ", " + p.Note
		}
		fmt.Fprintf(&b, "- **%s**, %s%s: PostgreSQL %s, Redis %s, %s; medians of %d rounds of %s. [All figures](../tests/bench/results/%s.md).\n",
			p.Machine["machine"], p.When.Format("2 January 2006"), note, firstOf(p.Machine["PostgreSQL"]), firstOf(p.Machine["Redis"]),
			p.Machine["Go"], p.Rounds, p.Window, p.file)
	}
	return b.String()
}

// firstOf is the version that a line begins with.
func firstOf(text string) string {
	if end := strings.IndexAny(text, " ,"); end >= 0 {
		return text[:end]
	}
	return text
}

// summary is the one table of each processor. What has no figure in a column was not measured so, or cannot be.
func summary(all []processor) string {
	columns := []struct {
		title, keys string
		callers     int
		metric      string
	}{
		{"1 caller, many keys", "uniform", 1, rate},
		{"64 callers, many keys", "uniform", 64, rate},
		{"256 callers, many keys", "uniform", 256, rate},
		{"64 callers, one key", "hot", 64, rate},
		{"256 callers, one key", "hot", 256, rate},
		{"p99 in ms", "uniform", 64, p99},
	}
	rows := []struct {
		title string
		cell  func(keys string, callers int) string
	}{
		{"**leased**", only64("leases/leaser/%s")},
		{"**combined**", cellOf("combined-noflush")},
		{"combined, flushed", cellOf("combined-flush")},
		{"plain", cellOf("plain-noflush")},
		{"plain, flushed", cellOf("plain-flush")},
		{"server by gRPC", servedCell("grpc")},
		{"redis_rate", cellOf("redis")},
		{"redis_rate, appendfsync always", cellOf("redis-aof")},
		{"redis_rate pipelined", cellOf("redis-pipelined")},
		{"redis_rate pipelined, appendfsync always", cellOf("redis-aof-pipelined")},
		{"Envoy's reference service on Redis", servedCell("envoy")},
		{"rate-limiter-flexible from Node.js, PostgreSQL", cellOf("npm/rate-limiter-flexible")},
		{"SQL of five statements", cellOf("statements")},
	}
	var b strings.Builder
	for i, p := range all {
		if i > 0 {
			b.WriteByte('\n')
		}
		head, table := []string{"**" + p.title() + "**"}, [][]string{}
		for _, c := range columns {
			head = append(head, c.title)
		}
		for _, row := range rows {
			line := []string{row.title}
			for _, c := range columns {
				text := "–"
				if m := p.find(row.cell(c.keys, c.callers) + "/" + c.metric); m != nil {
					text = thousands(m.Value)
					if c.metric == p99 {
						text = figure(roundTo(m.Value/1000, 3))
					}
				}
				line = append(line, text)
			}
			table = append(table, line)
		}
		b.WriteString(pageTable(head, table))
	}
	return b.String()
}

func cellOf(opponent string) func(string, int) string {
	return func(keys string, callers int) string { return cellName(opponent, keys, callers) }
}

func only64(format string) func(string, int) string {
	return func(keys string, callers int) string {
		if callers != leasesCallers {
			return ""
		}
		return fmt.Sprintf(format, keys)
	}
}

func servedCell(way string) func(string, int) string {
	return func(keys string, callers int) string {
		if keys != "uniform" {
			return ""
		}
		return servedName(way, callers)
	}
}
