// Package page is the status page: what an operator wants to see of a server and its database, in a browser.
package page

import (
	"bytes"
	"context"
	"crypto/sha256"
	_ "embed" // the template and its style
	"encoding/base64"
	"html/template"
	"log/slog"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/server/internal/inspect"
	"github.com/pgratelimit/pgratelimit/server/internal/metrics"
)

// refreshEvery is how often a browser loads the page again.
const refreshEvery = 10 * time.Second

// State is what the server knows of itself.
type State struct {
	metrics.State
	Health func() string // what is wrong, and nothing if all is well
	Leases bool          // there may be some
	Leased func() int64  // requests that were granted from them
}

// A Page answers requests for the status page.
type Page struct {
	history  *History
	database *database
	state    State
	log      *slog.Logger
	now      func() time.Time
	started  time.Time
}

// New returns a Page.
func New(history *History, db *pgxpool.Pool, state State, log *slog.Logger) *Page {
	return newPage(history, db, state, log, time.Now)
}

func newPage(history *History, db *pgxpool.Pool, state State, log *slog.Logger, now func() time.Time) *Page {
	return &Page{history: history, database: newDatabase(db, log, now), state: state, log: log, now: now, started: now()}
}

// Run keeps the history until ctx ends.
func (p *Page) Run(ctx context.Context) {
	ticker := time.NewTicker(sampleEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			p.history.Sample(p.now())
		}
	}
}

//go:embed page.html
var source string

//go:embed style.css
var style string

var page = template.Must(template.New("page").Funcs(template.FuncMap{"name": name, "number": number, "until": until}).Parse(source))

// policy lets the browser use the page's own style, and load and run nothing: whatever a key says, it stays text.
var policy = func() string {
	sum := sha256.Sum256([]byte(style))
	return "default-src 'none'; style-src 'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'; img-src data:; " +
		"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
}()

// ServeHTTP writes the page.
func (p *Page) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var text bytes.Buffer
	if err := page.Execute(&text, p.view(r.URL.Query().Get("refresh") != "off")); err != nil {
		p.log.Error("the status page cannot be written", "error", err)
		http.Error(w, "the page cannot be written", http.StatusInternalServerError)
		return
	}
	h := w.Header()
	h.Set("Content-Type", "text/html; charset=utf-8")
	h.Set("Content-Security-Policy", policy)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	h.Set("Cache-Control", "no-store")
	_, _ = w.Write(text.Bytes()) // who has left needs no answer
}

// A view is what the template shows.
type view struct {
	Style    template.CSS
	Refresh  int // seconds, or 0 for never
	Health   string
	Now      string
	Facts    []fact
	Plots    []plot
	Minutes  int
	Width    int
	Height   int
	Findings part[inspect.Finding]
	Buckets  part[bucket]
	Policies part[policyRow]
}

type fact struct{ Name, Value string }

// A part is a section as it is shown.
type part[T any] struct {
	Rows   []T
	IsRead bool // so that no rows are an answer, too
	Age    string
	Notice string
	More   bool // than Rows
}

type bucket struct {
	inspect.Bucket
	Percent float64 // of the capacity, from 0 to 100
	IsEmpty bool
}

type policyRow struct {
	client.Policy
	Refills  string
	Remember string
	Tags     []string
}

func (p *Page) view(refreshes bool) view {
	v := view{
		Style:   template.CSS(style), // ours
		Health:  p.state.Health(),
		Minutes: int((samples * sampleEvery).Minutes()),
		Width:   plotWidth,
		Height:  plotHeight,
	}
	if refreshes {
		v.Refresh = int(refreshEvery.Seconds())
	}
	seen := p.database.look(v.Health != "")
	now := p.now()
	v.Now = now.UTC().Format("15:04:05 UTC")
	v.Facts = []fact{
		{"Up", span(now.Sub(p.started))},
		{"Calls under way", number(p.state.CallsUnderWay())},
		{"Connections in use", number(p.state.ConnectionsInUse()) + " of " + number(p.state.ConnectionsTotal())},
	}
	if p.state.Leases {
		v.Facts = append(v.Facts, fact{"Granted from leases", number(p.state.Leased())})
	}
	for i, result := range results {
		v.Plots = append(v.Plots, plotOf(result, p.history.of(i)))
	}
	v.Findings = partOf(now, seen.findings, func(f inspect.Finding) inspect.Finding { return f })
	v.Buckets = partOf(now, seen.buckets, bucketOf)
	v.Policies = partOf(now, seen.policies, policyOf)
	if len(v.Policies.Rows) > maxPolicies {
		v.Policies.Rows, v.Policies.More = v.Policies.Rows[:maxPolicies], true
	}
	return v
}

func partOf[From, To any](now time.Time, s section[From], convert func(From) To) part[To] {
	p := part[To]{IsRead: !s.at.IsZero(), Notice: s.notice}
	for _, row := range s.rows {
		p.Rows = append(p.Rows, convert(row))
	}
	if p.IsRead {
		p.Age = "just now"
		if age := now.Sub(s.at); age >= time.Second {
			p.Age = span(age) + " ago"
		}
	}
	return p
}

func bucketOf(b inspect.Bucket) bucket {
	return bucket{Bucket: b, Percent: 100 * max(0, min(1, b.Share())), IsEmpty: b.Remaining < 1}
}

func policyOf(p client.Policy) policyRow {
	row := policyRow{Policy: p, Refills: "never", Remember: interval(p.Remember)}
	row.Capacity = max(0, p.Capacity) // of client.Zero
	if p.Refill != client.Zero {
		row.Refills = number(p.Refill) + " every " + interval(p.Every)
	}
	for _, tag := range []struct {
		is   bool
		name string
	}{{p.Stepped == client.Yes, "stepped"}, {p.Durable == client.No, "ephemeral"}, {p.Shadow == client.Yes, "shadow"}} {
		if tag.is {
			row.Tags = append(row.Tags, tag.name)
		}
	}
	return row
}
