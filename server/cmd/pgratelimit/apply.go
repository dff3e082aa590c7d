package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/server/policyfile"
)

func (p *program) apply() *cobra.Command {
	var options policyfile.Options
	var prune []string
	var dryRun bool
	c := &cobra.Command{
		Use:   "apply FILE",
		Short: "Make the policies and overrides of a database what a file says",
		Long: `Make the policies and overrides of a database what a file says, in one transaction. Of
shards, each has a transaction of its own, and the overrides of its keys.

Shows what changes: + is created, ~ is changed, - is dropped. FILE may be - for standard input.
The policies are also those that Envoy's rules of the file describe. What the file does not
have stays without --prune; overrides that it does not have are listed.

Ends with 0 when the database is as the file says, and with 2 when --dry-run has found a
difference, which is also an override that the file does not have. After an error nothing has been changed, or of shards only those before it.`,
		Example: `  pgratelimit apply limits.yaml --env production --dry-run
  pgratelimit apply limits.yaml --env production`,
	}
	flags := c.Flags()
	flags.StringVar(&options.Environment, "env", "", "apply what this environment of the file replaces, too")
	flags.StringSliceVar(&prune, "prune", nil, "drop policies that the file does not have, with all that belongs to them; overrides with --prune=overrides, and both with --prune=policies,overrides")
	flags.Lookup("prune").NoOptDefVal = "policies"
	flags.BoolVar(&dryRun, "dry-run", false, "show the difference and change nothing; end with 2 if there is one")
	c.RunE = func(c *cobra.Command, args []string) error {
		options.Prune, options.PruneOverrides = slices.Contains(prune, "policies"), slices.Contains(prune, "overrides")
		isUnknown := func(kind string) bool { return kind != "policies" && kind != "overrides" }
		if flags.Changed("prune") && (len(prune) == 0 || slices.ContainsFunc(prune, isUnknown)) {
			return usageOf(c, errors.New("--prune takes policies, overrides, or policies,overrides"))
		}
		file, err := readPolicies(c.InOrStdin(), args[0], options.Environment)
		if err != nil {
			return p.failedToApply(c, err)
		}
		run := policyfile.Apply
		if dryRun {
			run = policyfile.Plan
		}
		differs := false
		err = p.onEach(c, p.connect, nil, func(db database) error {
			if db.of > 0 {
				options.Has = func(key string) bool { return client.ShardOf(key, db.of) == db.shard }
			}
			d, err := run(c.Context(), db.Conn, file, options)
			if err != nil {
				return err
			}
			differs = differs || !d.Empty() || d.Drift != nil
			return p.showDifference(c, db, d, dryRun)
		})
		if err != nil {
			return p.failedToApply(c, err)
		}
		if dryRun && differs {
			return answerNo{}
		}
		return nil
	}
	return c
}

// readPolicies reads a file, or standard input, and little more of it than may be parsed.
func readPolicies(in io.Reader, path, environment string) (*policyfile.File, error) {
	name := "standard input"
	if path != "-" {
		name = path
		file, err := os.Open(path)
		if err != nil {
			return nil, fmt.Errorf("the policy file: %w", err)
		}
		defer file.Close()
		in = file
	}
	data, err := io.ReadAll(io.LimitReader(in, policyfile.MaxBytes+1))
	if err != nil {
		return nil, fmt.Errorf("the policy file: %w", err)
	}
	file, err := policyfile.Parse(name, data)
	if err == nil {
		_, err = file.Rules(environment)
	}
	return file, err
}

// A shownError has been printed.
type shownError struct{ error }

// failedToApply prints the mistakes of the file if they are to be JSON.
func (p *program) failedToApply(c *cobra.Command, err error) error {
	var problems policyfile.Problems
	if !p.json || !errors.As(err, &problems) {
		return err
	}
	return errors.Join(shownError{err}, encode(c.OutOrStdout(), map[string]policyfile.Problems{"problems": problems}, "  "))
}

func (p *program) showDifference(c *cobra.Command, db database, d *policyfile.Difference, dryRun bool) error {
	heading := db.prefix()
	if heading != "" && (!d.Empty() || d.Drift != nil) {
		heading += "\n"
	}
	if p.json {
		return encode(c.OutOrStdout(), struct {
			Database string `json:"database,omitempty"`
			Applied  bool   `json:"applied"`
			*policyfile.Difference
		}{db.String(), !dryRun, d}, "  ")
	}
	_, err := fmt.Fprint(c.OutOrStdout(), heading, d, d.Summary(dryRun))
	return err
}
