// Package policyfile reads policies, overrides and rules from one YAML file, and makes a database what the file says.
// The format is described in docs/policy-file.md, and for editors in schema.json.
//
//	file, err := policyfile.Parse("limits.yaml", data)
//	if err != nil {
//		return err // all mistakes, each as file:line:column: message
//	}
//	difference, err := policyfile.Apply(ctx, conn, file, policyfile.Options{Environment: "staging"})
//
// A file goes through these steps, a source file each:
//
//   - tree: YAML becomes nodes, each with its place. This is where a file that was made to hurt is stopped.
//   - overlay: an environment replaces nodes.
//   - read, and policy, override, http and envoy: nodes become [Rules]. Mistakes are collected, and reading goes on.
//   - plan: rules and what the database has become a [Difference].
//   - apply: the difference is made, in one transaction, through the public SQL functions.
//
// Rules for HTTP and Envoy are read and checked here. Whoever serves requests enforces them: [HTTP.Charges] is for
// package httplimit.
package policyfile
